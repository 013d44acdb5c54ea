//! Encoded rows kept for the next pass: packed, in memory or in a file of a cache folder.
//!
//! The file's name is a key: a hash of the data files' content, of the encoder (schema, vocabularies, statistics) and
//! of what else decides the rows. It is written under another name and renamed when a pass is whole.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::encoder::FittedEncoder;
use super::error::DataError;
use super::input::Place;
use super::packed::{pack, unpack};
use super::reader::Source;
use super::rows::{Rows, SkipReport};
use super::temporary::Temporary;

/// A file is its blocks, each behind its length; what was found; a checksum of that; the length of the blocks; this.
const MAGIC: &[u8; 8] = b"bkrows\x00\x03";

/// What a pass over the rows found besides them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Found {
    /// Rows.
    pub rows: u64,
    /// Whether they have labels.
    pub labelled: bool,
    /// Rows left out, and the first few reasons.
    pub skipped: u64,
    /// The first few.
    pub first: Vec<String>,
    /// Rows with a list that was cut.
    pub cut: u64,
}

impl Found {
    pub(crate) fn report(&self) -> SkipReport {
        SkipReport {
            skipped: self.skipped,
            first: self.first.clone(),
            cut: self.cut,
            ..SkipReport::default()
        }
    }
}

/// Where encoded rows are kept.
#[derive(Clone, Debug)]
pub enum Cache {
    /// In memory, once a pass is whole.
    Memory(Arc<Mutex<Option<Kept>>>),
    /// In a file.
    File(PathBuf),
}

/// Packed blocks and what was found.
#[derive(Clone, Debug, Default)]
pub struct Kept {
    blocks: Arc<Vec<Vec<u8>>>,
    found: Found,
}

impl Cache {
    /// An empty cache in memory.
    pub fn memory() -> Cache {
        Cache::Memory(Arc::default())
    }

    /// The file in `folder` for these rows. Reads all data files once, for the key.
    pub fn folder(folder: &Path, source: &Source, encoder: &FittedEncoder) -> Result<Cache, DataError> {
        std::fs::create_dir_all(folder).map_err(|e| DataError::io(folder, "create the cache folder", e))?;
        let key = key(source, encoder)?;
        Ok(Cache::File(folder.join(format!("{key:032x}.rows"))))
    }

    /// The rows, if they are there and whole; of a file that is not, a warning.
    pub(crate) fn read(&self) -> Result<Option<CacheReader>, DataError> {
        match self {
            Cache::Memory(kept) => {
                let kept = kept.lock().unwrap_or_else(|e| e.into_inner()).clone();
                Ok(kept.map(|k| CacheReader { found: k.found, blocks: Blocks::Memory(k.blocks, 0) }))
            }
            Cache::File(path) => {
                // a file that does not end as one should is as good as none
                let open = || -> std::io::Result<(BufReader<std::io::Take<File>>, Vec<u8>)> {
                    let mut file = File::open(path)?;
                    let size = file.metadata()?.len();
                    let mut tail = [0; 16];
                    file.seek(SeekFrom::End(-16))?;
                    file.read_exact(&mut tail)?;
                    let (blocks, magic) = tail.split_at(8);
                    let blocks = u64::from_le_bytes(blocks.try_into().map_err(std::io::Error::other)?);
                    if magic != MAGIC || blocks > size - 16 {
                        return Err(std::io::ErrorKind::InvalidData.into());
                    }
                    let mut found = Vec::new();
                    file.seek(SeekFrom::Start(blocks))?;
                    (&file).take(size - 16 - blocks).read_to_end(&mut found)?;
                    let sum = found.split_off(found.len().saturating_sub(8));
                    if sum != xxh3_64(&found).to_le_bytes() {
                        return Err(std::io::ErrorKind::InvalidData.into());
                    }
                    file.rewind()?;
                    Ok((BufReader::with_capacity(1 << 20, file.take(blocks)), found))
                };
                let opened = match open() {
                    Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
                    other => {
                        other.ok().and_then(|(f, found)| Some((f, serde_json::from_slice(&found).ok()?)))
                    }
                };
                let Some((file, found)) = opened else {
                    self.damaged();
                    return Ok(None);
                };
                Ok(Some(CacheReader { found, blocks: Blocks::File(file) }))
            }
        }
    }

    /// Says that the rows are read from the data instead.
    pub(crate) fn damaged(&self) {
        let name = match self {
            Cache::Memory(_) => Path::new("memory"),
            Cache::File(path) => path,
        };
        tracing::warn!(
            "{}: the cache is damaged; the data are read again, and it is made anew",
            name.display()
        );
    }

    /// A writer for a pass.
    pub(crate) fn write(&self) -> CacheWriter {
        CacheWriter { cache: self.clone(), blocks: vec![], file: None, failed: None }
    }
}

/// A length and so many bytes; `None` at the end.
fn frame(file: &mut impl Read) -> std::io::Result<Option<Vec<u8>>> {
    let mut length = [0; 8];
    match file.read(&mut length[..1])? {
        0 => return Ok(None),
        _ => file.read_exact(&mut length[1..])?,
    }
    let length = u64::from_le_bytes(length);
    let mut bytes = Vec::new();
    // grows as it is read: a damaged length allocates nothing
    file.take(length).read_to_end(&mut bytes)?;
    if bytes.len() as u64 != length {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some(bytes))
}

/// Reads cached rows.
pub(crate) struct CacheReader {
    /// What the pass that filled the cache found.
    pub found: Found,
    blocks: Blocks,
}

enum Blocks {
    Memory(Arc<Vec<Vec<u8>>>, usize),
    File(BufReader<std::io::Take<File>>),
}

impl CacheReader {
    /// Appends the next rows; `false` at the end, and `None` where the cache is damaged: then nothing is appended.
    pub fn next(&mut self, rows: &mut Rows) -> Option<bool> {
        let block = match &mut self.blocks {
            Blocks::Memory(blocks, at) => {
                *at += 1;
                blocks.get(*at - 1).map(|block| unpack(block, rows))
            }
            Blocks::File(file) => frame(file).ok()?.map(|block| unpack(&block, rows)),
        };
        match block {
            Some(unpacked) => unpacked.map(|()| true),
            None => Some(false),
        }
    }
}

/// Fills a cache during a pass.
pub(crate) struct CacheWriter {
    cache: Cache,
    blocks: Vec<Vec<u8>>,
    file: Option<(Temporary, BufWriter<File>)>,
    failed: Option<std::io::Error>,
}

impl CacheWriter {
    /// Keeps rows.
    pub fn push(&mut self, rows: &Rows) {
        if rows.is_empty() || self.failed.is_some() {
            return;
        }
        let block = pack(rows);
        let Cache::File(path) = &self.cache else {
            self.blocks.push(block);
            return;
        };
        let result = (|| {
            if self.file.is_none() {
                let temporary = Temporary::beside(path);
                let file = File::create(temporary.path())?;
                self.file = Some((temporary, BufWriter::with_capacity(1 << 20, file)));
            }
            if let Some((_, file)) = &mut self.file {
                file.write_all(&(block.len() as u64).to_le_bytes())?;
                file.write_all(&block)?;
            }
            Ok(())
        })();
        self.failed = result.err();
    }

    /// The pass is whole. A cache that cannot be written is a warning: training goes on without it.
    pub fn finish(mut self, found: Found) {
        match self.cache.clone() {
            Cache::Memory(kept) => {
                let blocks = Arc::new(std::mem::take(&mut self.blocks));
                *kept.lock().unwrap_or_else(|e| e.into_inner()) = Some(Kept { blocks, found });
            }
            Cache::File(path) => {
                let result = match (self.failed.take(), self.file.take()) {
                    // a pass that was not whole leaves nothing
                    (Some(e), _) => Err(e),
                    (None, Some((temporary, file))) => whole(&path, temporary, file, &found),
                    (None, None) => Ok(()),
                };
                if let Err(e) = result {
                    tracing::warn!("{}: the cache cannot be written: {e}", path.display());
                }
            }
        }
    }
}

/// Ends the file and gives it its final name.
fn whole(path: &Path, temporary: Temporary, mut file: BufWriter<File>, found: &Found) -> std::io::Result<()> {
    let blocks = file.stream_position()?;
    let found = serde_json::to_vec(found)?;
    file.write_all(&found)?;
    file.write_all(&xxh3_64(&found).to_le_bytes())?;
    file.write_all(&blocks.to_le_bytes())?;
    file.write_all(MAGIC)?;
    file.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()?;
    temporary.rename(path)
}

/// A hash of all that decides the encoded rows.
fn key(source: &Source, encoder: &FittedEncoder) -> Result<u128, DataError> {
    let mut hash = Xxh3::new();
    hash.update(MAGIC);
    let mut buffer = vec![0; 1 << 20];
    for place in &source.places {
        let path = place.name();
        match place {
            Place::Bytes(_, bytes) => hash.update(bytes),
            Place::Stdin => {
                let problem = "standard input cannot be cached; write it to a file first".into();
                return Err(DataError::Format { path, problem });
            }
            Place::File(file) | Place::Spooled(file, _) => {
                let mut file = File::open(file).map_err(|e| DataError::io(&path, "read", e))?;
                loop {
                    let n = file.read(&mut buffer).map_err(|e| DataError::io(&path, "read", e))?;
                    if n == 0 {
                        break;
                    }
                    hash.update(&buffer[..n]);
                }
            }
        }
        // two files are not one of both
        hash.update(b"\0file");
    }
    let rest = format!("{:?} {:?} {:?} {:?}", source.format, source.read, source.split, source.passed);
    hash.update(rest.as_bytes());
    let mut encoded = Vec::new();
    encoder.write_to(&mut encoded).map_err(|e| DataError::io(Path::new("encoder"), "write", e))?;
    hash.update(&encoded);
    Ok(hash.digest128())
}
