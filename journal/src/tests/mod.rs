mod crashes;
mod faults;
mod hostile;
mod processes;
mod sim;

use crate::{Journal, JournalError, Recovered};
use sim::Sim;
use std::collections::BTreeMap;

type Records = BTreeMap<Vec<u8>, Vec<u8>>;

const NAME: &str = "staged";
const FORMAT: u32 = 7;

fn open(sim: &Sim) -> Result<(Journal, Recovered), JournalError> {
    Journal::open_on(Box::new(sim.clone()), NAME, FORMAT)
}

fn records(journal: &Journal) -> Records {
    journal.iter().map(|(key, value)| (key.to_vec(), value.to_vec())).collect()
}

fn table(records: &[(&str, &str)]) -> Records {
    records.iter().map(|(key, value)| (key.as_bytes().to_vec(), value.as_bytes().to_vec())).collect()
}
