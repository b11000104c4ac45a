//! What the metadata store promises, as claims.
