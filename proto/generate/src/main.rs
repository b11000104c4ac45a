//! `make proto`: writes `proto/src/generated`.

use anyhow::Result;

fn main() -> Result<()> {
    let folder = proto_generate::generated();
    std::fs::create_dir_all(&folder)?;
    for (name, code) in proto_generate::generate()? {
        std::fs::write(folder.join(&name), code)?;
        println!("proto/src/generated/{name}");
    }
    Ok(())
}
