//! `hostile-agent`: an agent under an attacker's control; see `hostile::agent`.

use clap::Parser;

fn main() -> anyhow::Result<()> {
    hostile::agent::run(&hostile::agent::Options::parse())
}
