//! What a residual stream does, as numbers (math.md section 5): gains, sums, spectra, similarities. Pure
//! functions on small arrays, and the records in which a run keeps them.

pub mod card;
pub mod matrix;
pub mod measure;
pub mod record;
pub mod snapshot;

pub use card::{ModelCard, PartCard, TimeReport, TimeRow};
pub use matrix::Matrix;
pub use record::{LayerStats, ModuleStats, Record};
pub use snapshot::{LayerSnapshot, ModuleSnapshot, Snapshot};
