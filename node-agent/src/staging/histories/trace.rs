//! What happens, for a person.

/// With MILLPOND_TRACE all that happens is told.
pub(super) fn trace(what: impl FnOnce() -> String) {
    if std::env::var_os("MILLPOND_TRACE").is_some() {
        eprintln!("{}", what());
    }
}
