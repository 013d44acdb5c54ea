//! Schema, readers, vocabularies, batches, and the synthetic click log.

pub mod metrics;
