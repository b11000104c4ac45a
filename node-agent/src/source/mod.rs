//! A volume's source as the agent sees it: with credentials that change, answering or away.

pub(crate) mod credentials;
pub(crate) mod health;
pub(crate) mod outage;
pub(crate) mod profile;
pub(crate) mod stale;
