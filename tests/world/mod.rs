//! Generated rows in memory, for tests that train in process.

use birkhoff::data::FittedEncoder;
use birkhoff::data::criteo::{self, ReadOptions, RowPolicy};
use birkhoff::data::rows::Dataset;
use birkhoff::data::schema::{Encoding, Schema, Transform};
use birkhoff::data::synth::{DEFAULT_WORLD, Synth};
use std::path::Path;
use std::sync::Arc;

/// Rows to train on and to evaluate on, and a folder that goes away.
pub struct World {
    pub dir: tempfile::TempDir,
    pub data: Arc<Dataset>,
    pub valid: Arc<Dataset>,
    pub encoder: Arc<FittedEncoder>,
}

pub fn world(rows: u64, valid: u64) -> World {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rows.tsv");
    Synth::new(DEFAULT_WORLD, 7).write_file(&file, rows).unwrap();
    let other = dir.path().join("valid.tsv");
    Synth::new(DEFAULT_WORLD, 8).write_file(&other, valid).unwrap();
    let schema = Schema::criteo(Transform::Log, true, Encoding::Vocabulary { min_count: 2, max_size: None });
    let (encoder, _) = criteo::fit(&file, &schema, RowPolicy::Error).unwrap();
    let encoder = Arc::new(encoder);
    let load = |f: &Path| Arc::new(criteo::load(f, &encoder, ReadOptions::default()).unwrap());
    World { data: load(&file), valid: load(&other), encoder, dir }
}
