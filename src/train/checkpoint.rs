//! Weights on disk: named tensors as [safetensors](https://huggingface.co/docs/safetensors),
//! so that any tool of the field can read them. Names are those of the parameters, such as
//! `layers.2.attention.wq`.
//!
//! A file is checked against the tensors that the model expects before anything is allocated for
//! them; whatever is wrong with it is one line. The same weights give the same bytes.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::Path;

use safetensors::tensor::{Dtype, Metadata};
use serde_json::{Map, Value, json};
use xxhash_rust::xxh3::Xxh3Default;

use super::run::write_atomic;
use super::values::{file_type, memory_type, read_values, write_values};
use crate::graph::DType;

/// The version of the names and layouts of tensors; a newer file is refused.
pub const FORMAT: u32 = 1;

/// The largest header that is read, in bytes: some 100,000 tensors.
const MAX_HEADER: u64 = 16 << 20;

/// What is wrong with a checkpoint, in one line that starts with its path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointError {
    path: String,
    message: String,
    damaged: bool,
}

impl CheckpointError {
    /// Whether the file itself is broken, rather than one of another model.
    pub fn is_damaged(&self) -> bool {
        self.damaged
    }

    /// For another rank, which makes it of them again.
    #[cfg(not(target_arch = "wasm32"))]
    pub(super) fn to_words(&self) -> Vec<u8> {
        [&[u8::from(self.damaged)], self.path.as_bytes(), b"\0", self.message.as_bytes()].concat()
    }

    /// The reverse.
    #[cfg(not(target_arch = "wasm32"))]
    pub(super) fn from_words(words: &[u8]) -> Self {
        let text = String::from_utf8_lossy(words.get(1..).unwrap_or_default()).into_owned();
        let (path, message) = text.split_once('\0').unwrap_or_default();
        CheckpointError { path: path.into(), message: message.into(), damaged: words.first() == Some(&1) }
    }
}

impl fmt::Display for CheckpointError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = format!("{}: {}", self.path, self.message);
        // Names come from the file and may hold anything.
        line.chars().try_for_each(|c| {
            if c.is_control() { write!(f, "{}", c.escape_default()) } else { write!(f, "{c}") }
        })
    }
}

impl std::error::Error for CheckpointError {}

/// The name and shape of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// The parameter's name.
    pub name: String,
    /// Its shape, row-major.
    pub shape: Vec<usize>,
    /// How its elements are stored.
    pub dtype: DType,
}

impl TensorSpec {
    /// One of f32.
    pub fn f32(name: impl Into<String>, shape: impl Into<Vec<usize>>) -> Self {
        TensorSpec { name: name.into(), shape: shape.into(), dtype: DType::F32 }
    }

    /// A tensor of it.
    pub fn with<'a>(&'a self, data: &'a [f32]) -> TensorRef<'a> {
        TensorRef { name: &self.name, shape: &self.shape, dtype: self.dtype, data }
    }
}

/// A tensor to be written.
#[derive(Debug, Clone, Copy)]
pub struct TensorRef<'a> {
    /// The parameter's name.
    pub name: &'a str,
    /// Its shape, row-major.
    pub shape: &'a [usize],
    /// How its elements are stored.
    pub dtype: DType,
    /// Its elements, as many as the shape says; what 16 bits do not hold is rounded to nearest.
    pub data: &'a [f32],
}

/// What a header says of a tensor.
#[derive(Clone, Copy)]
struct Entry<'a> {
    name: &'a str,
    dtype: Dtype,
    shape: &'a [usize],
}

/// What a checkpoint says about itself. A file of another tool says nothing: all zero and empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckpointMeta {
    /// Version of birkhoff that wrote it; filled in by [`save`].
    pub birkhoff: String,
    /// Training steps that led to these weights.
    pub step: u64,
    /// Seed of the run.
    pub seed: u64,
    /// Anything else, such as the normalized entropy of the evaluation.
    pub extra: BTreeMap<String, String>,
}

/// The head of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointHeader {
    /// What the file says about itself.
    pub meta: CheckpointMeta,
    /// Its tensors, in the order of the file.
    pub tensors: Vec<TensorSpec>,
    /// The checksum of the header, and by way of the data's, which is in it, of the whole file; 0 in files of other tools.
    pub sum: u64,
}

/// Weights read from a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Checkpoint {
    /// What the file says about itself.
    pub meta: CheckpointMeta,
    /// The elements of each expected tensor, in the order asked for.
    pub tensors: Vec<Vec<f32>>,
}

/// Writes tensors, atomically: a crash leaves the old file. Returns the file's [`CheckpointHeader::sum`].
pub fn save(path: &Path, tensors: &[TensorRef<'_>], meta: &CheckpointMeta) -> Result<u64, CheckpointError> {
    let (head, sorted) = head(tensors, meta).map_err(|e| failed(path, e))?;
    write_atomic(path, |w| write_whole(w, &head.text, &sorted)).map_err(|e| cannot_write(path, e))?;
    Ok(head.sum)
}

/// [`save`] of tensors that come one after the other, in the order of their names, a part at a time: `fill` hands all
/// elements to its argument. For what is too large to be in memory at once.
///
/// # Errors
/// Those of `fill`, and of writing.
pub fn save_parts(
    path: &Path,
    tensors: &[TensorSpec],
    meta: &CheckpointMeta,
    fill: &mut Fill<'_>,
) -> anyhow::Result<()> {
    let entries = in_order(tensors.iter().map(|t| (t.name.as_str(), t.dtype, t.shape.as_slice())))
        .map_err(|e| failed(path, e))?;
    // a file that cannot be gone back in: its checksum is made in a first round
    let seekable = !crate::data::is_stream(path);
    let mut hash = Xxh3Default::new();
    let mut round = |w: Option<&mut dyn Write>, hash: &mut Xxh3Default| -> anyhow::Result<()> {
        // types and elements that are to come
        let mut left: VecDeque<(DType, usize)> =
            entries.iter().filter_map(|e| Some((memory_type(e.dtype)?, elements(e.shape)?))).collect();
        let mut w = w;
        let mut sink = |bytes: &[u8]| {
            hash.update(bytes);
            w.as_mut().map_or(Ok(()), |w| w.write_all(bytes))
        };
        fill(&mut |mut data: &[f32]| {
            while !data.is_empty() {
                let (dtype, n) = left.front_mut().expect("no more than the tensors have");
                let (now, later) = data.split_at(data.len().min(*n));
                write_values(&mut sink, *dtype, now)?;
                *n -= now.len();
                data = later;
                if *n == 0 {
                    left.pop_front();
                }
            }
            Ok(())
        })?;
        assert!(left.iter().all(|(_, n)| *n == 0), "as many elements as the tensors have");
        Ok(())
    };
    if !seekable {
        round(None, &mut hash)?;
    }
    let mut inside = None;
    let written = write_atomic(path, |w| {
        write_text(w, &header(&entries, meta, hash.digest()).text)?;
        let mut again = Xxh3Default::new();
        if let Err(e) = round(Some(w), &mut again) {
            let e = inside.insert(e);
            return Err(io::Error::other(format!("{e:#}")));
        }
        if seekable {
            w.seek(io::SeekFrom::Start(0))?;
            // of the same length: checksums have 16 digits
            write_text(w, &header(&entries, meta, again.digest()).text)?;
        }
        Ok(())
    });
    match (inside, written) {
        (Some(e), _) if !e.is::<io::Error>() => Err(e),
        (_, written) => Ok(written.map_err(|e| cannot_write(path, e))?),
    }
}

/// Hands all elements to its argument.
pub type Fill<'a> = dyn FnMut(&mut dyn FnMut(&[f32]) -> anyhow::Result<()>) -> anyhow::Result<()> + 'a;

fn failed(path: &Path, message: String) -> CheckpointError {
    CheckpointError { path: path.display().to_string(), message, damaged: false }
}

fn cannot_write(path: &Path, e: super::run::RunError) -> CheckpointError {
    match e {
        super::run::RunError::Io { message, .. } => {
            failed(path, format!("cannot write the checkpoint: {message}"))
        }
        other => failed(path, other.to_string()),
    }
}

/// The bytes of the file that [`save`] writes.
pub fn to_bytes(tensors: &[TensorRef<'_>], meta: &CheckpointMeta) -> Result<Vec<u8>, CheckpointError> {
    let fail = |e| failed(Path::new("checkpoint"), e);
    let (head, sorted) = head(tensors, meta).map_err(fail)?;
    let mut bytes = vec![];
    write_whole(&mut bytes, &head.text, &sorted).map_err(|e| fail(e.to_string()))?;
    Ok(bytes)
}

fn write_whole(w: &mut impl Write, text: &str, sorted: &[&TensorRef<'_>]) -> io::Result<()> {
    write_text(w, text)?;
    sorted.iter().try_for_each(|t| write_values(&mut |bytes| w.write_all(bytes), t.dtype, t.data))
}

/// A header, after its length.
fn write_text(w: &mut impl Write, text: &str) -> io::Result<()> {
    w.write_all(&(text.len() as u64).to_le_bytes())?;
    w.write_all(text.as_bytes())
}

/// Metadata: the checksum of the header, which [`head_hash`] makes. `xxh3` is that of the data.
const HEAD: &str = "xxh3_head";

/// A checksum of metadata (in the order of their keys, without this checksum) and of names, shapes and types other than
/// f32 (in the order of the file): a flipped bit in a name or a number would go unseen by a reader of JSON.
fn head_hash<'a>(
    about: impl Iterator<Item = (&'a str, &'a str)>,
    tensors: impl Iterator<Item = Entry<'a>>,
) -> u64 {
    let mut hash = Xxh3Default::new();
    for (k, v) in about.filter(|(k, _)| *k != HEAD) {
        hash.update(format!("{k}\0{v}\0").as_bytes());
    }
    for Entry { name, dtype, shape } in tensors {
        hash.update(format!("{name}\0{shape:?}\0").as_bytes());
        if dtype != Dtype::F32 {
            hash.update(format!("{dtype}\0").as_bytes());
        }
    }
    hash.digest()
}

/// A header, and its checksum.
struct Head {
    text: String,
    sum: u64,
}

/// By name, each once.
fn in_order<'a>(
    tensors: impl Iterator<Item = (&'a str, DType, &'a [usize])>,
) -> Result<Vec<Entry<'a>>, String> {
    let mut sorted: Vec<Entry<'_>> =
        tensors.map(|(name, dtype, shape)| Entry { name, dtype: file_type(dtype), shape }).collect();
    sorted.sort_by_key(|t| t.name);
    match sorted.windows(2).find(|pair| pair[0].name == pair[1].name) {
        Some(pair) => Err(format!("two tensors are named `{}`", pair[0].name)),
        None => Ok(sorted),
    }
}

/// The header, and the tensors in the order of the file.
fn head<'a, 'b>(
    tensors: &'a [TensorRef<'b>],
    meta: &CheckpointMeta,
) -> Result<(Head, Vec<&'a TensorRef<'b>>), String> {
    let entries = in_order(tensors.iter().map(|t| (t.name, t.dtype, t.shape)))?;
    let mut sorted: Vec<&TensorRef<'_>> = tensors.iter().collect();
    sorted.sort_by_key(|t| t.name);
    let mut hash = Xxh3Default::new();
    for t in &sorted {
        if elements(t.shape) != Some(t.data.len()) || t.name == "__metadata__" {
            return Err(format!("`{}` {:?} does not have {} elements", t.name, t.shape, t.data.len()));
        }
        write_values(
            &mut |bytes| {
                hash.update(bytes);
                Ok(())
            },
            t.dtype,
            t.data,
        )
        .map_err(|e| e.to_string())?;
    }
    Ok((header(&entries, meta, hash.digest()), sorted))
}

/// The header of tensors in the order of the file, whose data have a checksum.
fn header(tensors: &[Entry<'_>], meta: &CheckpointMeta, data: u64) -> Head {
    let mut about: BTreeMap<&str, String> = meta.extra.iter().map(|(k, v)| (k.as_str(), v.clone())).collect();
    about.insert("birkhoff_format", FORMAT.to_string());
    about.insert("birkhoff_version", env!("CARGO_PKG_VERSION").into());
    about.insert("step", meta.step.to_string());
    about.insert("seed", meta.seed.to_string());
    about.insert("xxh3", format!("{data:016x}"));
    let sum = head_hash(about.iter().map(|(k, v)| (*k, v.as_str())), tensors.iter().copied());
    about.insert(HEAD, format!("{sum:016x}"));
    let mut whole = Map::new();
    whole.insert("__metadata__".into(), json!(about));
    let mut offset = 0;
    for Entry { name, dtype, shape } in tensors {
        let end = offset + shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let dtype = dtype.to_string();
        whole.insert((*name).into(), json!({"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}));
        offset = end;
    }
    let mut text = Value::Object(whole).to_string();
    // Readers may map the file: the data start at a multiple of 8 bytes.
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    Head { text, sum }
}

/// Reads the header alone: what is in the file, without its data.
pub fn read_header(path: &Path) -> Result<CheckpointHeader, CheckpointError> {
    let (_, header) = Reader { path }.open()?;
    let meta = Reader { path }.meta(&header)?;
    let info = |name: String| {
        let i = header.info(&name)?;
        Some(TensorSpec { shape: i.shape.clone(), dtype: memory_type(i.dtype).unwrap_or_default(), name })
    };
    let tensors = header.offset_keys().into_iter().filter_map(info).collect();
    Ok(CheckpointHeader { meta, tensors, sum: sum(&header) })
}

/// Reads exactly the tensors of `expected`: each is there with its shape, and no other is.
pub fn load(path: &Path, expected: &[TensorSpec]) -> Result<Checkpoint, CheckpointError> {
    let reader = Reader { path };
    let (file, header) = reader.open()?;
    reader.tensors(io::BufReader::with_capacity(1 << 20, file), &header, expected)
}

/// As [`load`], from a file's bytes; errors call it `name`.
pub fn from_bytes(
    name: &str,
    mut bytes: &[u8],
    expected: &[TensorSpec],
) -> Result<Checkpoint, CheckpointError> {
    let reader = Reader { path: Path::new(name) };
    let size = bytes.len() as u64;
    let header = reader.header(&mut bytes, size)?;
    reader.tensors(bytes, &header, expected)
}

/// What [`CheckpointHeader::sum`] is of a header.
pub(super) fn sum(header: &Metadata) -> u64 {
    let text = header.metadata().as_ref().and_then(|m| m.get(HEAD));
    text.and_then(|t| u64::from_str_radix(t, 16).ok()).unwrap_or(0)
}

fn elements(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |p, &s| p.checked_mul(s))
}

/// The checks of reading, all of which speak of one path.
pub(super) struct Reader<'a> {
    pub(super) path: &'a Path,
}

impl Reader<'_> {
    pub(super) fn fail(&self, message: impl Into<String>) -> CheckpointError {
        CheckpointError { path: self.path.display().to_string(), message: message.into(), damaged: false }
    }

    pub(super) fn damaged(&self, message: impl Into<String>) -> CheckpointError {
        CheckpointError { damaged: true, ..self.fail(message) }
    }

    /// The file, at the start of its data, and its header.
    pub(super) fn open(&self) -> Result<(File, Metadata), CheckpointError> {
        if self.path.is_dir() {
            return Err(self.fail("is a folder, not a safetensors file"));
        }
        let mut file = File::open(self.path).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => self.fail("no such file; train the run again"),
            _ => self.fail(format!("cannot open: {e}")),
        })?;
        let size = file.metadata().map_err(|e| self.fail(format!("cannot open: {e}")))?.len();
        let header = self.header(&mut file, size)?;
        Ok((file, header))
    }

    /// The header of a file of `size` bytes, which describes exactly that many.
    fn header(&self, file: &mut impl Read, size: u64) -> Result<Metadata, CheckpointError> {
        let broken = |what: &str| {
            self.damaged(format!(
                "not a safetensors file, or damaged: {what}; copy it again, or train the run again"
            ))
        };
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(|_| broken(&format!("it has {size} bytes")))?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER || length > size.saturating_sub(8) {
            return Err(broken(&format!("its header claims {length} bytes of a file of {size}")));
        }
        let mut text = vec![0; length as usize];
        file.read_exact(&mut text).map_err(|e| broken(&e.to_string()))?;
        let header: Metadata =
            serde_json::from_slice(&text).map_err(|e| broken(&format!("its header: {e}")))?;
        let data = size - 8 - length;
        if header.data_len() as u64 != data {
            let claims = header.data_len();
            return Err(self.damaged(format!(
                "is cut off or damaged: its header describes {claims} bytes of data, the file has {data}; \
                 copy it again, or train the run again"
            )));
        }
        Ok(header)
    }

    /// The tensors of `expected`, from the start of the data.
    fn tensors(
        &self,
        mut input: impl Read,
        header: &Metadata,
        expected: &[TensorSpec],
    ) -> Result<Checkpoint, CheckpointError> {
        let meta = self.meta(header)?;
        let wanted: HashMap<&str, usize> =
            expected.iter().enumerate().map(|(i, t)| (t.name.as_str(), i)).collect();
        let names = header.offset_keys();
        let found = names.iter().filter_map(|n| header.info(n).map(|i| (n.as_str(), i.dtype, &i.shape[..])));
        self.check(&found.collect::<Vec<_>>(), expected)?;

        let mut tensors = vec![Vec::new(); expected.len()];
        let mut hash = Xxh3Default::new();
        for name in header.offset_keys() {
            // `check` has found every name and shape as expected.
            let Some(&i) = wanted.get(name.as_str()) else { continue };
            let mut data = vec![0.0f32; elements(&expected[i].shape).unwrap_or(0)];
            read_values(&mut input, expected[i].dtype, &mut data, &mut |bytes| hash.update(bytes))
                .map_err(|e| self.damaged(format!("cannot read tensor `{name}`: {e}")))?;
            tensors[i] = data;
        }
        self.compare(header, hash.digest())?;
        Ok(Checkpoint { meta, tensors })
    }

    /// The checksum of the data against that of the header.
    pub(super) fn compare(&self, header: &Metadata, hash: u64) -> Result<(), CheckpointError> {
        let recorded = header.metadata().as_ref().and_then(|m| m.get("xxh3"));
        match recorded.is_some_and(|r| *r != format!("{hash:016x}")) {
            true => {
                Err(self.damaged("the data do not match their checksum: the file is damaged; copy it again"))
            }
            false => Ok(()),
        }
    }

    pub(super) fn meta(&self, header: &Metadata) -> Result<CheckpointMeta, CheckpointError> {
        let mut extra: BTreeMap<String, String> =
            header.metadata().clone().unwrap_or_default().into_iter().collect();
        let whole = extra.clone();
        extra.remove(HEAD);
        extra.remove("xxh3");
        let birkhoff = extra.remove("birkhoff_version").unwrap_or_default();
        let mut number = |key: &str| -> Result<u64, CheckpointError> {
            let Some(text) = extra.remove(key) else { return Ok(0) };
            text.parse().map_err(|_| self.fail(format!("its metadata have {key} = {text:?}, not a number")))
        };
        let (format, step, seed) = (number("birkhoff_format")?, number("step")?, number("seed")?);
        if format > u64::from(FORMAT) {
            return Err(self.fail(format!(
                "was written by birkhoff {birkhoff} in format {format}; this version reads up to {FORMAT}, upgrade it"
            )));
        }
        if let Some(recorded) = whole.get(HEAD) {
            let names = header.offset_keys();
            let infos = names.iter().filter_map(|n| header.info(n).map(|i| (n, i)));
            let entries = infos.map(|(name, i)| Entry { name, dtype: i.dtype, shape: &i.shape });
            let about = whole.iter().map(|(k, v)| (k.as_str(), v.as_str()));
            if *recorded != format!("{:016x}", head_hash(about, entries)) {
                return Err(self
                    .damaged("the header does not match its checksum: the file is damaged; copy it again"));
            }
        }
        Ok(CheckpointMeta { birkhoff, step, seed, extra })
    }

    /// Names, types and shapes of a file against those that a model has.
    pub(super) fn check(
        &self,
        found: &[(&str, Dtype, &[usize])],
        expected: &[TensorSpec],
    ) -> Result<(), CheckpointError> {
        const CAUSE: &str = "the weights belong to another config.toml (was it edited after training?)";
        let more = |n: usize| if n > 1 { format!(" (and {} more)", n - 1) } else { String::new() };
        let by_name: HashMap<&str, (Dtype, &[usize])> =
            found.iter().map(|(n, d, s)| (*n, (*d, *s))).collect();
        let missing: Vec<_> = expected.iter().filter(|t| !by_name.contains_key(t.name.as_str())).collect();
        if let Some(t) = missing.first() {
            let more = more(missing.len());
            return Err(self.fail(format!("has no tensor `{}` {:?}{more}; {CAUSE}", t.name, t.shape)));
        }
        let wanted: HashSet<&str> = expected.iter().map(|t| t.name.as_str()).collect();
        let surplus: Vec<_> = found.iter().filter(|t| !wanted.contains(t.0)).collect();
        if let Some((name, ..)) = surplus.first() {
            let more = more(surplus.len());
            return Err(self.fail(format!("has a tensor `{name}`{more} that the model does not; {CAUSE}")));
        }
        for t in expected {
            let Some(&(dtype, shape)) = by_name.get(t.name.as_str()) else { continue };
            let wanted = file_type(t.dtype);
            if dtype != wanted {
                return Err(
                    self.fail(format!("tensor `{}` is {dtype}; birkhoff reads {wanted} here", t.name))
                );
            }
            if shape != t.shape {
                let rows_only = shape.len() == t.shape.len() && shape.get(1..) == t.shape.get(1..);
                let cause = match rows_only && t.name.contains("embedding") {
                    true => "the weights belong to another vocab.json",
                    false => CAUSE,
                };
                return Err(self.fail(format!(
                    "tensor `{}` has shape {:?}, the model expects {:?}; {cause}",
                    t.name, shape, t.shape
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "checkpoint_tests.rs"]
mod tests;
