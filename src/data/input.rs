//! Where rows come from: a file, standard input or memory, decompressed by content, in UTF-8.

use std::io::{self, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::DataError;
use super::format::FormatOptions;

/// Bytes that formats are told from.
pub const HEAD: usize = 1 << 16;

/// What errors call standard input.
pub(crate) const STDIN: &str = "standard input";

/// One input.
#[derive(Clone, Debug)]
pub enum Place {
    /// A file.
    File(PathBuf),
    /// Standard input, once.
    Stdin,
    /// What standard input or a pipe gave, in a file; and as errors call it.
    Spooled(PathBuf, PathBuf),
    /// Bytes under a name.
    Bytes(String, Arc<[u8]>),
}

impl Place {
    /// As errors call it.
    pub fn name(&self) -> PathBuf {
        match self {
            Place::File(path) => path.clone(),
            Place::Stdin => STDIN.into(),
            Place::Spooled(_, name) => name.clone(),
            Place::Bytes(name, _) => name.into(),
        }
    }

    /// Opens it for reading from the start.
    fn raw(&self) -> Result<Box<dyn Read + Send>, DataError> {
        Ok(match self {
            Place::File(path) | Place::Spooled(path, _) => {
                let file = std::fs::File::open(path).map_err(|e| DataError::io(&self.name(), "read", e))?;
                if file.metadata().is_ok_and(|m| m.is_dir()) {
                    return Err(DataError::Directory { path: path.to_path_buf() });
                }
                Box::new(file)
            }
            Place::Stdin => Box::new(io::stdin()),
            Place::Bytes(_, bytes) => Box::new(Cursor::new(Arc::clone(bytes))),
        })
    }

    /// Opens it, decompressed and in UTF-8, with its first bytes, which are read again by the reader.
    pub fn open(&self, options: &FormatOptions) -> Result<(Vec<u8>, Box<dyn Read + Send>), DataError> {
        let path = self.name();
        let read = |e| DataError::io(&path, "read", e);
        let mut raw = self.raw()?;
        let magic = head(&mut raw, 4).map_err(read)?;
        let whole = Cursor::new(magic.clone()).chain(raw);
        let plain: Box<dyn Read + Send> = match &magic[..] {
            [0x1f, 0x8b, ..] => Box::new(Compressed { inner: gzip(whole), kind: "gzip" }),
            [0x28, 0xb5, 0x2f, 0xfd] => Box::new(Compressed { inner: zstd(&path, whole)?, kind: "zstd" }),
            _ => Box::new(whole),
        };
        let mut text = decode(&path, plain, &options.encoding)?;
        let mut first = head(&mut text, HEAD).map_err(read)?;
        if ends_lines_with_cr(&first) {
            first.iter_mut().for_each(|b| *b = if *b == b'\r' { b'\n' } else { *b });
            text = Box::new(CrToLf(text));
        }
        Ok((first.clone(), Box::new(Cursor::new(first).chain(text))))
    }

    /// The whole content, for formats that are read from their end.
    #[cfg(all(feature = "formats", not(target_arch = "wasm32")))]
    pub(crate) fn seekable(&self) -> Result<Seekable, DataError> {
        match self {
            Place::File(path) | Place::Spooled(path, _) => {
                let file = std::fs::File::open(path).map_err(|e| DataError::io(&self.name(), "read", e))?;
                Ok(Seekable::File(file))
            }
            Place::Bytes(_, bytes) => Ok(Seekable::Bytes(bytes.to_vec())),
            Place::Stdin => {
                let mut bytes = Vec::new();
                io::stdin().read_to_end(&mut bytes).map_err(|e| DataError::io(&self.name(), "read", e))?;
                Ok(Seekable::Bytes(bytes))
            }
        }
    }
}

/// What can be read from any place.
#[cfg(all(feature = "formats", not(target_arch = "wasm32")))]
pub(crate) enum Seekable {
    File(std::fs::File),
    Bytes(Vec<u8>),
}

/// Whether a text that starts so has lines that end in carriage returns alone, as spreadsheets on a Mac write them.
fn ends_lines_with_cr(first: &[u8]) -> bool {
    let binary = first.starts_with(b"PAR1") || first.starts_with(b"ARROW1") || first.contains(&0);
    !binary && !first.contains(&b'\n') && first.iter().filter(|&&b| b == b'\r').count() > 1
}

/// Lines of such a text as other systems end them.
struct CrToLf(Box<dyn Read + Send>);

impl Read for CrToLf {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.0.read(buffer)?;
        buffer[..n].iter_mut().for_each(|b| *b = if *b == b'\r' { b'\n' } else { *b });
        Ok(n)
    }
}

/// Up to `n` bytes.
fn head(reader: &mut impl Read, n: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reader.by_ref().take(n as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Compressed data, whose errors say so.
struct Compressed {
    inner: Box<dyn Read + Send>,
    kind: &'static str,
}

impl Read for Compressed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.inner.read(buffer).map_err(|e| match e.kind() {
            io::ErrorKind::Interrupted => e,
            _ => io::Error::other(format!(
                "its {} data are damaged or cut short ({e}); copy the file again",
                self.kind
            )),
        })
    }
}

/// A gzip file of one or more members.
fn gzip(reader: impl Read + Send + 'static) -> Box<dyn Read + Send> {
    Box::new(flate2::bufread::MultiGzDecoder::new(BufReader::with_capacity(1 << 16, reader)))
}

#[cfg(all(feature = "formats", not(target_arch = "wasm32")))]
fn zstd(path: &Path, reader: impl Read + Send + 'static) -> Result<Box<dyn Read + Send>, DataError> {
    let decoder = zstd::Decoder::new(reader).map_err(|e| DataError::io(path, "read", e))?;
    Ok(Box::new(decoder))
}

#[cfg(not(all(feature = "formats", not(target_arch = "wasm32"))))]
fn zstd(path: &Path, _: impl Read) -> Result<Box<dyn Read + Send>, DataError> {
    let problem =
        "is zstd-compressed, which this build does not read; decompress it first (unzstd FILE)".into();
    Err(DataError::Format { path: path.to_path_buf(), problem })
}

/// The text in UTF-8, where `label` names another character set.
fn decode(path: &Path, reader: Box<dyn Read + Send>, label: &str) -> Result<Box<dyn Read + Send>, DataError> {
    if label.is_empty() || matches!(label.to_ascii_lowercase().as_str(), "utf-8" | "utf8") {
        return Ok(reader);
    }
    transcode(path, reader, label)
}

#[cfg(all(feature = "formats", not(target_arch = "wasm32")))]
fn transcode(
    path: &Path,
    reader: Box<dyn Read + Send>,
    label: &str,
) -> Result<Box<dyn Read + Send>, DataError> {
    let Some(encoding) = encoding_rs::Encoding::for_label(label.as_bytes()) else {
        let problem = format!(
            "data.encoding = {label:?} is no character set; expected a name such as utf-8, latin1, windows-1252, utf-16, shift_jis"
        );
        return Err(DataError::Format { path: path.to_path_buf(), problem });
    };
    let decoder = encoding_rs_io::DecodeReaderBytesBuilder::new().encoding(Some(encoding)).build(reader);
    Ok(Box::new(decoder))
}

#[cfg(not(all(feature = "formats", not(target_arch = "wasm32"))))]
fn transcode(path: &Path, _: Box<dyn Read + Send>, label: &str) -> Result<Box<dyn Read + Send>, DataError> {
    let problem =
        format!("data.encoding = {label:?}, but this build reads UTF-8 only; convert the file (iconv)");
    Err(DataError::Format { path: path.to_path_buf(), problem })
}

/// Whether a path is a pipe or a terminal, whose content can be read once only: standard input, a FIFO, a shell's
/// `<(…)`, also one that is gone since.
#[cfg(not(target_arch = "wasm32"))]
pub fn is_pipe(path: &Path) -> bool {
    if path.as_os_str() == "-" || path == Path::new("/dev/stdin") {
        return true;
    }
    match std::fs::metadata(path) {
        Ok(meta) => !meta.is_file() && !meta.is_dir(),
        Err(_) => path.starts_with("/dev/fd") || path.starts_with("/proc"),
    }
}

/// Files for patterns: `-` is standard input, `*`, `?` and `[…]` match names, in sorted order; a pattern that
/// matches nothing is an error.
#[cfg(not(target_arch = "wasm32"))]
pub fn places(patterns: &[PathBuf]) -> Result<Vec<Place>, DataError> {
    let mut places = Vec::new();
    for pattern in patterns {
        let text = pattern.to_string_lossy();
        if text == "-" || text == "/dev/stdin" {
            places.push(Place::Stdin);
        } else if pattern.exists() || !text.contains(['*', '?', '[']) {
            places.push(Place::File(pattern.clone()));
        } else {
            let fail = |problem: String| DataError::Format { path: pattern.clone(), problem };
            let found = glob::glob(&text).map_err(|e| fail(format!("is no pattern: {e}")))?;
            let before = places.len();
            for path in found {
                let path = path.map_err(|e| fail(format!("cannot be searched: {e}")))?;
                if path.is_file() {
                    places.push(Place::File(path));
                }
            }
            if places.len() == before {
                return Err(fail(
                    "no file matches this pattern; check the path, and quote it in the shell".into(),
                ));
            }
        }
    }
    if places.iter().filter(|p| matches!(p, Place::Stdin)).count() > 1 {
        let problem = "standard input (-) can be read once only".into();
        return Err(DataError::Format { path: "-".into(), problem });
    }
    Ok(places)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn compression_is_told_by_content() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.csv");
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(b"a,b\n1,2\n").unwrap();
        let one = gz.finish().unwrap();
        let read = |bytes: &[u8], encoding: &str| {
            std::fs::write(&path, bytes).unwrap();
            let o = FormatOptions { encoding: encoding.into(), ..Default::default() };
            let (first, mut all) = Place::File(path.clone()).open(&o)?;
            let mut text = Vec::new();
            all.read_to_end(&mut text).map_err(|e| DataError::io(&path, "read", e))?;
            assert!(text.starts_with(&first));
            Ok::<_, DataError>(String::from_utf8(text).unwrap())
        };
        assert_eq!(read(&one, "").unwrap(), "a,b\n1,2\n");
        assert_eq!(read(&[&one[..], &one[..]].concat(), "").unwrap(), "a,b\n1,2\na,b\n1,2\n");
        assert!(read(&one[..one.len() - 9], "").unwrap_err().to_string().contains("cannot read"));
        assert_eq!(read("plain".as_bytes(), "utf-8").unwrap(), "plain");
        #[cfg(feature = "formats")]
        {
            let z = zstd::encode_all(&b"zz\n"[..], 1).unwrap();
            assert_eq!(read(&z, "").unwrap(), "zz\n");
            assert_eq!(read(b"caf\xe9", "latin1").unwrap(), "café");
            assert_eq!(read(b"\xff\xfea\0", "utf-16").unwrap(), "a");
            assert!(read(b"x", "latin-nonsense").unwrap_err().to_string().contains("no character set"));
        }
        assert_eq!(read(b"", "").unwrap(), "");
        assert_eq!(read(b"a,b\r1,2\r3,4\r", "").unwrap(), "a,b\n1,2\n3,4\n");
        assert_eq!(read(b"a,b\r\n1,2\r\n", "").unwrap(), "a,b\r\n1,2\r\n");
    }

    #[test]
    fn patterns_name_files_in_order() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b.tsv", "a.tsv", "c.csv"] {
            std::fs::write(dir.path().join(name), "x").unwrap();
        }
        let found = places(&[dir.path().join("*.tsv"), "-".into()]).unwrap();
        let names: Vec<String> =
            found.iter().map(|p| p.name().file_name().unwrap().to_string_lossy().into()).collect();
        assert_eq!(names, ["a.tsv", "b.tsv", "standard input"]);
        let text = places(&[dir.path().join("*.gz")]).unwrap_err().to_string();
        assert!(text.contains("no file matches"), "{text}");
        assert!(places(&["-".into(), "-".into()]).is_err());
    }
}
