//! Where a run's rows come from: memory, or files that are read anew (or from a cache) in every pass.

use std::sync::Arc;
#[cfg(not(target_arch = "wasm32"))]
use std::sync::OnceLock;

use super::batch::GroupLayout;
#[cfg(not(target_arch = "wasm32"))]
use super::drift::Seen;
#[cfg(not(target_arch = "wasm32"))]
use super::encoder::FittedEncoder;
use super::error::DataError;
use super::loader::{Loader, LoaderOptions, Order};
use super::rows::Dataset;

/// Rows to make batches of, again and again.
#[derive(Clone, Debug)]
pub enum Feed {
    /// Rows in memory.
    Memory(Arc<Dataset>),
    /// Files.
    #[cfg(not(target_arch = "wasm32"))]
    Files(Arc<Files>),
}

/// Rows of files, never held whole unless a cache in memory is asked for.
#[cfg(not(target_arch = "wasm32"))]
#[derive(Clone, Debug)]
pub struct Files {
    /// The files.
    pub source: super::reader::Source,
    /// What turns their rows into numbers.
    pub encoder: Arc<FittedEncoder>,
    /// Encoded rows of an earlier pass.
    pub cache: Option<super::cache::Cache>,
    /// Rows that are shuffled together.
    pub shuffle: usize,
    /// Where what the rows are like is to be told, once a pass has read them all.
    pub seen: Option<Arc<OnceLock<Seen>>>,
}

impl From<Arc<Dataset>> for Feed {
    fn from(data: Arc<Dataset>) -> Feed {
        Feed::Memory(data)
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl From<Files> for Feed {
    fn from(files: Files) -> Feed {
        Feed::Files(files.into())
    }
}

impl Feed {
    /// The batches of a pass.
    pub fn loader(
        &self,
        groups: Arc<[GroupLayout]>,
        order: Order,
        options: LoaderOptions,
    ) -> Result<Loader, DataError> {
        match self {
            Feed::Memory(data) => Loader::dataset(data.clone(), groups, order, options),
            #[cfg(not(target_arch = "wasm32"))]
            Feed::Files(files) => Loader::files(files.clone(), groups, order, options),
        }
    }
}

/// Rows of an encoder's files, for [`Feed::Files`].
#[cfg(not(target_arch = "wasm32"))]
impl Files {
    /// Files without a cache.
    pub fn new(source: super::reader::Source, encoder: Arc<FittedEncoder>) -> Files {
        Files { source, encoder, cache: None, shuffle: super::order::SHUFFLE_ROWS, seen: None }
    }
}
