//! A checkpoint as several ranks write it: one file with what is the same everywhere, named after its step as that of one
//! rank is, and beside it a file a rank with the parts of the tables that lie there:
//!
//! ```text
//! checkpoints/step-000000120.safetensors                    dense parameters, their optimiser's state; names the others
//! checkpoints/step-000000120-00000-of-00002.safetensors     embeddings.C1[0..500], embeddings.C1#acc[0..500], …
//! checkpoints/step-000000120-00001-of-00002.safetensors     embeddings.C1[500..1200], …
//! ```
//!
//! `[rows]` or `[rows, columns]` after a tensor's name says which part of it that is. The first file has each other's
//! checksum, and is written when all of them are complete: where it is, the checkpoint is whole, and files of different
//! ones are never mixed. Any number of ranks reads it.

use std::collections::BTreeMap;
use std::ffi::OsStr;
#[cfg(not(target_arch = "wasm32"))]
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, Metadata};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3Default;

use super::checkpoint::{self, CheckpointError, CheckpointMeta, Reader, TensorSpec};
use super::run::shard_step;
use super::values::{memory_type, read_values};

/// The key of [`Shard`]s in the metadata of the first file.
pub(super) const SHARDS: &str = "shards";

/// How names of what belongs to one of several ranks begin, which no model has: rounding that error feedback will add.
pub(super) const FEEDBACK: &str = "feedback.";

/// Values read at a time where only a part of each is wanted.
const STRETCH: usize = 1 << 18;

/// Another file of a checkpoint, as the first one names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// Its name, in the same folder.
    pub file: String,
    /// Its [`checkpoint::CheckpointHeader::sum`], in hexadecimal digits.
    pub sum: String,
}

/// A part of a tensor: all dimensions after the first are its columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) rows: Range<usize>,
    pub(super) columns: Range<usize>,
}

impl Part {
    /// All of a tensor.
    fn whole(shape: &[usize]) -> Part {
        let columns = shape.get(1..).unwrap_or_default().iter().product();
        Part { rows: 0..shape.first().copied().unwrap_or(1), columns: 0..columns }
    }

    fn len(&self) -> usize {
        self.rows.len() * self.columns.len()
    }

    fn meets(&self, other: &Part) -> Option<Part> {
        let meet = |a: &Range<usize>, b: &Range<usize>| a.start.max(b.start)..a.end.min(b.end);
        let (rows, columns) = (meet(&self.rows, &other.rows), meet(&self.columns, &other.columns));
        (!rows.is_empty() && !columns.is_empty()).then_some(Part { rows, columns })
    }
}

/// The name and shape of a part of a tensor in a file.
#[cfg(not(target_arch = "wasm32"))]
pub(super) fn part_spec(tensor: &TensorSpec, part: &Part) -> TensorSpec {
    let (mut name, mut shape) = (tensor.name.clone(), tensor.shape.clone());
    let _ = write!(name, "[{}..{}", part.rows.start, part.rows.end);
    if part.columns != Part::whole(&tensor.shape).columns {
        let _ = write!(name, ", {}..{}", part.columns.start, part.columns.end);
        shape = vec![0, part.columns.len()];
    }
    name.push(']');
    shape[0] = part.rows.len();
    TensorSpec { name, shape, dtype: tensor.dtype }
}

/// The reverse: the tensor's name, rows, and columns where they are not all.
fn parse_name(name: &str) -> Option<(&str, Range<usize>, Option<Range<usize>>)> {
    let range = |text: &str| {
        let (a, b) = text.split_once("..")?;
        let (a, b) = (a.parse().ok()?, b.parse().ok()?);
        (a <= b).then_some(a..b)
    };
    let (tensor, part) = name.strip_suffix(']')?.rsplit_once('[')?;
    match part.split_once(", ") {
        None => Some((tensor, range(part)?, None)),
        Some((rows, columns)) => Some((tensor, range(rows)?, Some(range(columns)?))),
    }
}

/// One of the files.
struct Piece {
    path: PathBuf,
    file: File,
    header: Metadata,
    /// Where its data begin, in bytes.
    data: u64,
}

impl Piece {
    fn open(path: &Path) -> Result<Piece, CheckpointError> {
        let reader = Reader { path };
        let (mut file, header) = reader.open()?;
        let data = file.stream_position().map_err(|e| reader.fail(format!("cannot read: {e}")))?;
        Ok(Piece { path: path.to_owned(), file, header, data })
    }

    fn damaged(&self, message: impl Into<String>) -> CheckpointError {
        Reader { path: &self.path }.damaged(message)
    }

    /// Reads all data against their checksum.
    fn verify(&mut self) -> Result<(), CheckpointError> {
        let mut hash = Xxh3Default::new();
        let mut read = || -> io::Result<()> {
            self.file.seek(SeekFrom::Start(self.data))?;
            let mut block = vec![0; 1 << 20];
            loop {
                match self.file.read(&mut block)? {
                    0 => return Ok(()),
                    n => hash.update(&block[..n]),
                }
            }
        };
        read().map_err(|e| self.damaged(format!("cannot be read: {e}")))?;
        Reader { path: &self.path }.compare(&self.header, hash.digest())
    }
}

/// Where a part of a tensor is.
struct Found {
    piece: usize,
    part: Part,
    /// In bytes from the start of the file.
    at: u64,
}

/// A tensor, of one or several parts.
struct Whole {
    dtype: Dtype,
    shape: Vec<usize>,
    parts: Vec<Found>,
}

/// A checkpoint of one or several files, open for reading any part of any tensor. Errors are one line that begins with the
/// path of the file that they are about.
pub struct Checkpoint {
    meta: CheckpointMeta,
    sum: u64,
    pieces: Vec<Piece>,
    tensors: BTreeMap<String, Whole>,
}

impl Checkpoint {
    /// Opens all files and reads their headers.
    ///
    /// # Errors
    /// If one is missing, damaged, or belongs to another checkpoint.
    pub fn open(path: &Path) -> Result<Checkpoint, CheckpointError> {
        let reader = Reader { path };
        let first = Piece::open(path)?;
        let mut meta = reader.meta(&first.header)?;
        let sum = checkpoint::sum(&first.header);
        let mut pieces = vec![first];
        if let Some(text) = meta.extra.remove(SHARDS) {
            let shards: Vec<Shard> = serde_json::from_str(&text)
                .map_err(|e| reader.damaged(format!("its list of files cannot be read: {e}")))?;
            for shard in shards {
                // a name, not a path to somewhere else
                if shard_step(OsStr::new(&shard.file)).is_none() {
                    return Err(reader.damaged(format!("names a file {:?}, which cannot be", shard.file)));
                }
                let path = path.with_file_name(&shard.file);
                if !path.exists() {
                    return Err(Reader { path: &path }.damaged("is missing, a part of the checkpoint"));
                }
                let piece = Piece::open(&path)?;
                Reader { path: &path }.meta(&piece.header)?;
                if format!("{:016x}", checkpoint::sum(&piece.header)) != shard.sum {
                    return Err(piece.damaged("is not the file that was written with the checkpoint"));
                }
                pieces.push(piece);
            }
        }
        let mut tensors: BTreeMap<String, Whole> = BTreeMap::new();
        for (i, piece) in pieces.iter().enumerate() {
            for name in piece.header.offset_keys() {
                let Some(info) = piece.header.info(&name) else { continue };
                let own = Part::whole(&info.shape);
                let (tensor, part) = match (i, parse_name(&name)) {
                    (0, _) => (name.as_str(), own.clone()),
                    (_, Some((tensor, rows, columns))) => {
                        (tensor, Part { rows, columns: columns.unwrap_or(own.columns.clone()) })
                    }
                    (_, None) => return Err(piece.damaged(format!("`{name}` does not say which part it is"))),
                };
                if (part.rows.len(), part.columns.len()) != (own.rows.len(), own.columns.len()) {
                    return Err(piece.damaged(format!("`{name}` has shape {:?}", info.shape)));
                }
                let fresh = || Whole { dtype: info.dtype, shape: info.shape.clone(), parts: vec![] };
                let whole = tensors.entry(tensor.to_owned()).or_insert_with(fresh);
                if whole.dtype != info.dtype || whole.shape.len() != info.shape.len() {
                    return Err(
                        piece.damaged(format!("`{name}` is of another kind than the other parts of it"))
                    );
                }
                if let Some(rows) = whole.shape.first_mut() {
                    *rows = (*rows).max(part.rows.end);
                }
                if let [_, columns] = &mut whole.shape[..] {
                    *columns = (*columns).max(part.columns.end);
                }
                let at = piece.data + info.data_offsets.0 as u64;
                whole.parts.push(Found { piece: i, part, at });
            }
        }
        let it = Checkpoint { meta, sum, pieces, tensors };
        it.covered()?;
        Ok(it)
    }

    /// Every value of every tensor is there once.
    fn covered(&self) -> Result<(), CheckpointError> {
        for (name, t) in &self.tensors {
            let all: usize = t.parts.iter().map(|f| f.part.len()).sum();
            let mut pairs =
                t.parts.iter().enumerate().flat_map(|(i, a)| t.parts[..i].iter().map(move |b| (a, b)));
            if all != t.shape.iter().product::<usize>() || pairs.any(|(a, b)| a.part.meets(&b.part).is_some())
            {
                return Err(self.pieces[0].damaged(format!(
                    "the parts of `{name}` in its {} files do not make {:?}",
                    self.pieces.len(),
                    t.shape
                )));
            }
        }
        Ok(())
    }

    /// What the first file says of itself.
    pub fn meta(&self) -> &CheckpointMeta {
        &self.meta
    }

    /// The first file's [`checkpoint::CheckpointHeader::sum`], and by way of those in it that of all.
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// The number of files.
    pub fn files(&self) -> usize {
        self.pieces.len()
    }

    /// Names and shapes of the tensors, by name.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let spec = |(name, t): (&String, &Whole)| TensorSpec {
            name: name.clone(),
            shape: t.shape.clone(),
            dtype: memory_type(t.dtype).unwrap_or_default(),
        };
        self.tensors.iter().map(spec).collect()
    }

    /// That exactly the tensors of `expected` are there, what is a rank's own apart.
    ///
    /// # Errors
    /// If they are not.
    pub fn check(&self, expected: &[TensorSpec]) -> Result<(), CheckpointError> {
        let models = self.tensors.iter().filter(|(n, _)| !n.starts_with(FEEDBACK));
        let found: Vec<_> = models.map(|(n, t)| (n.as_str(), t.dtype, &t.shape[..])).collect();
        Reader { path: &self.pieces[0].path }.check(&found, expected)
    }

    /// Whether it has a tensor.
    #[cfg(not(target_arch = "wasm32"))]
    pub(super) fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    /// Reads the data of some of the files, numbered from 0, against their checksums.
    ///
    /// # Errors
    /// If one is damaged.
    pub fn verify(&mut self, which: impl Fn(usize) -> bool) -> Result<(), CheckpointError> {
        let mut chosen = self.pieces.iter_mut().enumerate().filter(|(i, _)| which(*i));
        chosen.try_for_each(|(_, p)| p.verify())
    }

    /// Some rows and columns of a tensor, row by row.
    ///
    /// # Errors
    /// If it cannot be read.
    ///
    /// # Panics
    /// If there is no such tensor, or it is smaller.
    pub(super) fn read(&mut self, tensor: &str, wanted: &Part) -> Result<Vec<f32>, CheckpointError> {
        let t = self.tensors.get(tensor).unwrap_or_else(|| panic!("no tensor named {tensor}"));
        let dtype = memory_type(t.dtype).unwrap_or_default();
        let mut out = vec![0f32; wanted.len()];
        let mut there = 0;
        for f in &t.parts {
            let Some(meet) = f.part.meets(wanted) else { continue };
            there += meet.len();
            let piece = &mut self.pieces[f.piece];
            let (width, wide) = (f.part.columns.len(), wanted.columns.len());
            let first = (meet.rows.start - f.part.rows.start) * width;
            let to = (meet.rows.start - wanted.rows.start) * wide;
            let mut read = || -> io::Result<()> {
                piece.file.seek(SeekFrom::Start(f.at + (dtype.size() * first) as u64))?;
                if f.part.columns == wanted.columns {
                    let out = &mut out[to..to + meet.len()];
                    return read_values(&mut piece.file, dtype, out, &mut |_| {});
                }
                let mut input = BufReader::with_capacity(dtype.size() * STRETCH, &mut piece.file);
                let mut row = vec![0f32; width];
                let (from, at) =
                    (meet.columns.start - f.part.columns.start, meet.columns.start - wanted.columns.start);
                for r in 0..meet.rows.len() {
                    read_values(&mut input, dtype, &mut row, &mut |_| {})?;
                    let n = meet.columns.len();
                    out[to + r * wide + at..][..n].copy_from_slice(&row[from..from + n]);
                }
                Ok(())
            };
            read().map_err(|e| piece.damaged(format!("cannot read tensor `{tensor}`: {e}")))?;
        }
        assert_eq!(there, out.len(), "{tensor} {:?} has no {wanted:?}", t.shape);
        Ok(out)
    }

    /// A whole tensor.
    ///
    /// # Errors
    /// If it cannot be read.
    ///
    /// # Panics
    /// If there is no such tensor.
    pub fn whole(&mut self, tensor: &str) -> Result<Vec<f32>, CheckpointError> {
        let shape = self.tensors.get(tensor).map(|t| t.shape.clone());
        self.read(tensor, &Part::whole(&shape.unwrap_or_else(|| panic!("no tensor named {tensor}"))))
    }

    /// Puts some of its tensors together in one file, without having more than a part of one in memory.
    ///
    /// # Errors
    /// If one of the files cannot be read, or the other not written.
    pub fn gather(&mut self, to: &Path, tensors: &[TensorSpec], meta: &CheckpointMeta) -> anyhow::Result<()> {
        let mut names: Vec<&TensorSpec> = tensors.iter().collect();
        names.sort_by_key(|t| &t.name);
        checkpoint::save_parts(to, tensors, meta, &mut |push| {
            for t in &names {
                let Part { rows, columns } = Part::whole(&t.shape);
                let step = (STRETCH / columns.len().max(1)).max(1);
                for at in rows.clone().step_by(step) {
                    let rows = at..(at + step).min(rows.end);
                    push(&self.read(&t.name, &Part { rows, columns: columns.clone() })?)?;
                }
            }
            Ok(())
        })
    }
}

#[cfg(test)]
#[path = "sharded_tests.rs"]
mod tests;
