//! `hostile-worker`: a worker under an attacker's control; see `hostile::worker`.

fn main() -> anyhow::Result<()> {
    hostile::worker::run()
}
