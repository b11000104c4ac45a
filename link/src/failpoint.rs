//! Places at which a process dies on demand, so that a test can crash it at each step of what must survive that.

use std::sync::OnceLock;

/// The environment variable that names a step.
const VARIABLE: &str = "MILLPOND_FAILPOINT";

/// Ends the process, as a crash would, if `MILLPOND_FAILPOINT` names this step. Nothing otherwise.
pub fn hit(step: &str) {
    static STEP: OnceLock<Option<String>> = OnceLock::new();
    if STEP.get_or_init(|| std::env::var(VARIABLE).ok()).as_deref() == Some(step) {
        std::process::abort();
    }
}
