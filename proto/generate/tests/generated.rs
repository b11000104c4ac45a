//! The generated code is what the `.proto` files say.

use std::collections::BTreeSet;

#[test]
fn the_generated_code_is_of_these_proto_files() {
    let folder = proto_generate::generated();
    let code = proto_generate::generate().unwrap();
    for (name, wanted) in &code {
        let found = std::fs::read_to_string(folder.join(name)).unwrap_or_default();
        assert!(
            found == *wanted,
            "proto/src/generated/{name} is not what the .proto files say: run `make proto`"
        );
    }
    let wanted: BTreeSet<String> = code.into_keys().collect();
    let entries = std::fs::read_dir(&folder).unwrap();
    let found: BTreeSet<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(found, wanted, "a file of no package: remove it");
}
