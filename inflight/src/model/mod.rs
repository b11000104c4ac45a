//! The shared memory under a model checker (`make model`): every order in which a few threads can do what they do, and
//! every value that C11's memory model lets each load see. The code is the product's; its atomics are loom's.
//!
//! Not modelled:
//! - the kernel, which copies a request into a buffer and a file's bytes to a reader: here relaxed stores and loads do;
//! - a death: what is left then is the crash tests' (`tests`), for a process that is gone runs beside nobody;
//! - a load that sees a store of which it decides whether it happens (load buffering), which loom does not explore;
//! - a load that sees an older value than the last seven of its word: loom keeps no more;
//! - SeqCst, which loom takes for AcqRel in loads and stores: no code here uses it for shared memory;
//! - all tables at once, and more threads and requests than a model has.

pub(crate) mod atomic;
mod bugs;
mod check;
mod models;

use check::explore;
use models::MODELS;

#[test]
fn models_hold() {
    println!();
    let (mut all, mut failed) = (0, 0);
    for model in MODELS {
        let bound = model.preemptions.map_or("every one".to_owned(), |most| format!("preemptions <= {most}"));
        let verdict = match explore(model, None) {
            Ok(executions) => {
                all += executions;
                format!("{executions:>7} executions, {bound:16} holds")
            }
            Err(failure) => {
                failed += 1;
                format!("FAILED, {failure}")
            }
        };
        println!("model {:20} {verdict}", model.name);
    }
    println!("model {:20} {all:>7} executions", "all");
    assert_eq!(failed, 0, "models that do not hold");
}
