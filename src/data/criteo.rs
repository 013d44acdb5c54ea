//! Criteo's tab-separated click log: label, I1..I13, C1..C26, an empty field = missing. Its rows are read as
//! delimited text ([`super::delimited`]); here is what is known of its columns.

use std::path::Path;

use super::encoder::FittedEncoder;
use super::error::DataError;
use super::input::Place;
use super::reader::{self, Source};
use super::rows::{Dataset, SkipReport};
use super::schema::{CRITEO_CATEGORICAL, CRITEO_NUMERIC, Schema};

pub use super::reader::{Labels, ReadOptions, RowPolicy};

/// Fits an encoder to a training file in one pass.
pub fn fit(
    path: &Path,
    schema: &Schema,
    policy: RowPolicy,
) -> Result<(FittedEncoder, SkipReport), DataError> {
    check_columns(schema)?;
    let read = ReadOptions { policy, labels: Labels::Required };
    reader::fit(&Source::criteo(Place::File(path.into()), read), schema)
}

/// Reads and encodes a whole file into memory, in file order.
pub fn load(path: &Path, encoder: &FittedEncoder, options: ReadOptions) -> Result<Dataset, DataError> {
    check_columns(&encoder.schema)?;
    reader::load(&Source::criteo(Place::File(path.into()), options), encoder)
}

/// A schema for this format must have its number of columns.
pub fn check_columns(schema: &Schema) -> Result<(), DataError> {
    let (n, c) = (schema.numeric.len(), schema.categorical.len());
    if (n, c) == (CRITEO_NUMERIC, CRITEO_CATEGORICAL) {
        return Ok(());
    }
    Err(DataError::Schema {
        column: "I1..C26".into(),
        problem: format!("{n} numeric and {c} categorical columns, the criteo format has 13 and 26"),
    })
}

#[cfg(test)]
#[path = "criteo_tests.rs"]
mod tests;
