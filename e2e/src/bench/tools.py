"""What a training program does with a checkpoint: saved beside its place, synced, renamed, loaded again. Arguments: torch or
safetensors, directory, bytes. Prints the seconds that saving and loading took. Exit status 3: there is no such library."""

import os
import sys
import time

kind, directory, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
try:
    import torch

    if kind == "safetensors":
        from safetensors.torch import load_file, save_file
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(3)

TENSORS = 16
torch.manual_seed(7)
state = {f"layer{n}": torch.rand(size // TENSORS // 4) for n in range(TENSORS)}
path, beside = os.path.join(directory, "model"), os.path.join(directory, ".model.new")

begun = time.perf_counter()
if kind == "safetensors":
    save_file(state, beside)
    with open(beside, "rb+") as file:
        os.fsync(file.fileno())
else:
    with open(beside, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
os.replace(beside, path)
saved = time.perf_counter()
loaded = load_file(path) if kind == "safetensors" else torch.load(path)
total = sum(float(tensor.sum()) for tensor in loaded.values())
done = time.perf_counter()
assert total == sum(float(tensor.sum()) for tensor in state.values()), "what was loaded is not what was saved"
print(saved - begun, done - saved)
