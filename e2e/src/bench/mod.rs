//! Benchmarks: the rows that matter, Millpond beside native reads, curl and peers, interleaved in rounds. Numbers, no
//! verdict.

mod compare;
mod curl;
#[cfg(test)]
mod example;
mod machine;
mod measure;
mod numbers;
mod pages;
mod peers;
mod record;
mod rows;
mod stage;
mod subject;
mod table;
mod tools;
mod who;
mod work;
mod workload;
mod writes;

pub use compare::compare;
pub use record::{Record, replace};
pub use stage::{FEATURES, Options};
pub use table::markdown;
pub use workload::{Size, workloads};

use anyhow::Result;
use stage::Stage;

/// Measures; `keep` is called after each sample with all so far.
pub fn run(options: Options, keep: impl Fn(&Record) -> Result<()> + 'static) -> Result<Record> {
    let mut stage = Stage::set(options, keep)?;
    rows::large::play(&mut stage)?;
    rows::small::play(&mut stage)?;
    rows::listing::play(&mut stage)?;
    rows::model::play(&mut stage)?;
    rows::first_byte::play(&mut stage)?;
    rows::publish::play(&mut stage)?;
    rows::checkpoint::play(&mut stage)?;
    rows::saves::play(&mut stage)?;
    rows::programs::play(&mut stage)?;
    stage.strike()
}
