//! `ls -lR` of very many objects.

use crate::bench::stage::Stage;
use crate::bench::subject::Subject;
use crate::bench::who::Who;
use crate::bench::work;
use crate::bench::workload::{LIST_COLD, LIST_WARM};
use anyhow::{Result, ensure};
use std::time::Duration;

const PREFIX: &str = "objects";
const PER_DIRECTORY: usize = 1000;
/// Of one walk; s3fs looks each name up anew, which takes a quarter of an hour.
const LIMIT: Duration = Duration::from_secs(300);

pub(in crate::bench) fn play(stage: &mut Stage) -> Result<()> {
    if !stage.wants_any([LIST_COLD, LIST_WARM]) {
        return Ok(());
    }
    let directories = stage.size().objects / PER_DIRECTORY;
    let names = stage.write_small(PREFIX, directories, PER_DIRECTORY, 16)?.len() + directories;
    for round in 0..stage.size().rounds {
        work::drop_page_cache()?;
        let native = Subject::bare(Who::Native, stage.node().server.dir().join(PREFIX));
        walk(stage, &native, names, round)?;
        for who in stage.mounted([LIST_COLD, LIST_WARM], round) {
            let result = mounted(stage, who, names, round);
            stage.forgive(who, LIST_COLD, result)?;
        }
    }
    Ok(())
}

fn mounted(stage: &mut Stage, who: Who, names: usize, round: usize) -> Result<()> {
    let endpoint = stage.node().server.endpoint();
    let prefix = stage.fresh(PREFIX)?;
    let subject = stage.mount(who, &prefix, &endpoint, "small")?;
    walk(stage, &subject, names, round)?;
    stage.done(subject, &prefix)
}

/// `names` must be there, directories included.
fn walk(stage: &mut Stage, subject: &Subject, names: usize, round: usize) -> Result<()> {
    for workload in [LIST_COLD, LIST_WARM] {
        stage.sample(subject, workload, round, || {
            let (seconds, seen) = work::walk(&subject.root, LIMIT)?;
            ensure!(seen as usize == names, "ls -lR saw {seen} names instead of {names}");
            Ok(seconds)
        })?;
    }
    Ok(())
}
