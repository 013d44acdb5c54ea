//! A text file as blocks of whole lines, read with a bounded buffer.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::error::DataError;

/// Bytes of a block, about: what is made of one stays in a core's cache.
pub const BLOCK_BYTES: usize = 1 << 18;
/// The longest line of a Criteo file; what is longer is cut just above it.
pub const LONGEST_LINE: usize = 1 << 16;
/// The longest line of any other text.
pub const LONGEST_RECORD: usize = 8 << 20;

/// Where records end, if a quoted field may hold line breaks (RFC 4180).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quoting {
    /// Between fields.
    pub delimiter: u8,
    /// Around fields.
    pub quote: u8,
    /// Whether a quote behind blanks begins a field, too.
    pub trim: bool,
}

impl Quoting {
    /// The end of the last whole record of a text that starts with a record; `None` where none is whole.
    fn last_end(self, text: &[u8]) -> Option<usize> {
        let (mut last, mut at) = (None, 0);
        let mut start_of_field = true;
        while at < text.len() {
            let byte = text[at];
            at += 1;
            if start_of_field && byte == self.quote {
                // to the closing quote; a doubled one closes and opens again
                at += text[at..].iter().position(|&b| b == self.quote)? + 1;
                while text.get(at) == Some(&self.quote) {
                    at += 1;
                    at += text[at..].iter().position(|&b| b == self.quote)? + 1;
                }
                start_of_field = false;
            } else {
                let blank =
                    start_of_field && self.trim && matches!(byte, b' ' | b'\t') && byte != self.delimiter;
                start_of_field = byte == self.delimiter || byte == b'\n' || blank;
                if byte == b'\n' {
                    last = Some(at);
                }
            }
        }
        last
    }
}

/// What the first bytes of a file say it is, when it is not text: magic, kind, remedy.
const NOT_TEXT: [(&[u8], &str, &str); 9] = [
    (b"\x1f\x8b", "gzip-compressed twice", "decompress it first (gunzip -k FILE)"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed", "decompress it first (unzstd FILE)"),
    (b"BZh", "bzip2-compressed", "decompress it first (bunzip2 -k FILE)"),
    (b"\xfd7zXZ\0", "xz-compressed", "decompress it first (unxz -k FILE)"),
    (b"\x04\x22\x4d\x18", "lz4-compressed", "decompress it first (unlz4 FILE)"),
    (b"PK\x03\x04", "a zip archive", "unpack it first (unzip FILE)"),
    (b"PAR1", "a Parquet file", "leave data.format out, or set it to parquet"),
    (
        b"\xff\xfe",
        "UTF-16 text",
        "set data.encoding = \"utf-16\", or convert it (iconv -f UTF-16 -t UTF-8 FILE)",
    ),
    (
        b"\xfe\xff",
        "UTF-16 text",
        "set data.encoding = \"utf-16\", or convert it (iconv -f UTF-16 -t UTF-8 FILE)",
    ),
];

/// Whole lines of a file.
#[derive(Debug)]
pub struct Block {
    /// The lines; the last one may lack its newline.
    pub text: Vec<u8>,
    /// Offset of `text` in the file.
    pub offset: u64,
    /// Number of the first line, from 1.
    pub first_line: u64,
}

/// Reads blocks.
#[derive(Debug)]
pub struct BlockReader<R = File> {
    path: PathBuf,
    source: R,
    /// The start of a line whose end has not been read.
    carry: Vec<u8>,
    /// Offset of `carry` in the file.
    offset: u64,
    line: u64,
    started: bool,
    ended: bool,
    block_bytes: usize,
    longest: usize,
    quoting: Option<Quoting>,
    /// Memory of blocks that are done with: what is new must first be mapped and cleared, which costs more than
    /// reading.
    spare: Vec<Vec<u8>>,
}

impl BlockReader<File> {
    /// Opens a file; a missing file or a directory is named as such.
    pub fn open(path: &Path) -> Result<BlockReader, DataError> {
        let file = File::open(path).map_err(|e| DataError::io(path, "read", e))?;
        if file.metadata().is_ok_and(|m| m.is_dir()) {
            return Err(DataError::Directory { path: path.to_path_buf() });
        }
        Ok(BlockReader::new(path, file, BLOCK_BYTES))
    }
}

impl<R: Read> BlockReader<R> {
    /// Reads `source`, which errors call `path`, in blocks of about `block_bytes`.
    pub fn new(path: &Path, source: R, block_bytes: usize) -> BlockReader<R> {
        BlockReader {
            path: path.to_path_buf(),
            source,
            carry: Vec::new(),
            offset: 0,
            line: 1,
            started: false,
            ended: false,
            block_bytes: block_bytes.max(1),
            longest: LONGEST_LINE,
            quoting: None,
            spare: Vec::new(),
        }
    }

    /// Takes back the memory of a block.
    pub fn recycle(&mut self, text: Vec<u8>) {
        if text.capacity() > 0 && text.capacity() < 4 * self.block_bytes {
            self.spare.push(text);
        }
    }

    /// The same for lines of up to `longest` bytes, in records whose quoted fields may hold line breaks.
    pub fn records(mut self, longest: usize, quoting: Option<Quoting>) -> BlockReader<R> {
        (self.longest, self.quoting) = (longest, quoting);
        self
    }

    /// The end of the last whole record in `text`, of which no line ends before `searched`.
    fn record_end(&self, text: &[u8], searched: usize) -> Option<usize> {
        match self.quoting {
            Some(q) if text.contains(&q.quote) => q.last_end(text),
            _ => text[searched..].iter().rposition(|&b| b == b'\n').map(|last| searched + last + 1),
        }
    }

    /// The file, as errors call it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next block; `None` at the end of the file.
    pub fn next_block(&mut self) -> Result<Option<Block>, DataError> {
        let mut text = self.spare.pop().unwrap_or_default();
        text.clear();
        text.extend_from_slice(&self.carry);
        let mut dropped = 0;
        let mut searched = 0; // no newline in text[..searched]
        // Until there is a whole line and the block is full; a line without end is cut on the way.
        let end = loop {
            let room = match self.block_bytes.saturating_sub(text.len()) {
                0 => self.block_bytes.max(1 << 12),
                room => room.max(1 << 12),
            };
            self.fill(&mut text, room)?;
            if !self.started {
                self.start(&mut text)?;
            }
            if dropped > 0
                && let Some(newline) = text[searched..].iter().position(|&b| b == b'\n')
            {
                break searched + newline + 1; // what follows a cut has an offset of its own
            }
            if self.ended {
                break text.len();
            }
            if text.len() >= self.block_bytes
                && dropped == 0
                && let Some(end) = self.record_end(&text, searched)
            {
                break end;
            }
            if text.len() >= self.block_bytes {
                if text.len() > self.longest + 1 {
                    // A quote that is never closed must not swallow the file.
                    if let Some(last) = text.iter().rposition(|&b| b == b'\n') {
                        break last + 1;
                    }
                    dropped += (text.len() - self.longest - 1) as u64;
                    text.truncate(self.longest + 1);
                }
                searched = text.len();
            }
        };
        self.carry.clear();
        self.carry.extend_from_slice(&text[end..]);
        text.truncate(end);
        if text.is_empty() {
            return Ok(None);
        }
        let first_line = self.line;
        self.line += newlines(&text);
        let offset = self.offset;
        self.offset += dropped + text.len() as u64;
        Ok(Some(Block { text, offset, first_line }))
    }

    /// Appends up to `room` bytes, as many as there are.
    fn fill(&mut self, text: &mut Vec<u8>, room: usize) -> Result<(), DataError> {
        // or else it grows, and is copied, step by step
        text.reserve(room + 64);
        let read = self.source.by_ref().take(room as u64).read_to_end(text);
        let read = read.map_err(|e| DataError::io(&self.path, "read", e))?;
        self.ended = read < room;
        Ok(())
    }

    /// Looks at the file's first bytes: refuses what is not text, skips a UTF-8 byte order mark.
    fn start(&mut self, text: &mut Vec<u8>) -> Result<(), DataError> {
        self.started = true;
        if let Some((_, kind, remedy)) = NOT_TEXT.iter().find(|(magic, ..)| text.starts_with(magic)) {
            let name = self.path.to_string_lossy().escape_debug().to_string();
            let remedy = remedy.replace("FILE", &name);
            return Err(DataError::NotPlainText { path: self.path.clone(), kind, remedy });
        }
        if text.starts_with(b"\xef\xbb\xbf") {
            // Offsets still count its three bytes.
            text.drain(..3);
            self.offset = 3;
        }
        Ok(())
    }
}

/// Line breaks of a text, counted in bytes so that many are compared at once.
fn newlines(text: &[u8]) -> u64 {
    let few = |c: &[u8]| u64::from(c.iter().map(|&b| u8::from(b == b'\n')).sum::<u8>());
    text.chunks(255).map(few).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn blocks(bytes: &[u8], size: usize) -> Vec<Block> {
        let mut reader = BlockReader::new(Path::new("f"), bytes, size);
        std::iter::from_fn(|| reader.next_block().unwrap()).collect()
    }

    proptest! {
        #[test]
        fn blocks_are_the_file_in_whole_lines(text in "[ab\r\n]{0,200}", size in 1usize..64) {
            // `fill` reads 4 KiB at least, so repeat the text to have many blocks.
            let text = text.repeat(300);
            let (mut at, mut line) = (0, 1);
            for b in blocks(text.as_bytes(), size) {
                prop_assert_eq!((b.offset, b.first_line), (at as u64, line));
                prop_assert_eq!(&text.as_bytes()[at..at + b.text.len()], &b.text[..]);
                at += b.text.len();
                line += b.text.iter().filter(|&&c| c == b'\n').count() as u64;
                prop_assert!(b.text.ends_with(b"\n") || at == text.len());
            }
            prop_assert_eq!(at, text.len());
        }
    }

    proptest! {
        #[test]
        fn quoted_records_stay_whole(
            records in prop::collection::vec(("[ab]{0,3}", "[a,\n\"]{0,6}", any::<bool>()), 1..40),
        ) {
            let q = Quoting { delimiter: b',', quote: b'"', trim: false };
            let mut text = String::new();
            let mut ends = vec![0];
            for (plain, odd, repeat) in &records {
                let odd = odd.repeat(if *repeat { 700 } else { 1 }).replace('"', "\"\"");
                text.push_str(&format!("{plain},\"{odd}\"\n"));
                ends.push(text.len());
            }
            let mut reader =
                BlockReader::new(Path::new("f"), text.as_bytes(), 64).records(LONGEST_RECORD, Some(q));
            let (mut at, mut line) = (0, 1);
            while let Some(b) = reader.next_block().unwrap() {
                prop_assert_eq!((b.offset as usize, b.first_line), (at, line));
                at += b.text.len();
                line += b.text.iter().filter(|&&c| c == b'\n').count() as u64;
                prop_assert!(ends.contains(&at), "a block ends inside a record");
            }
            prop_assert_eq!(at, text.len());
        }
    }

    #[test]
    fn an_endless_line_is_cut_and_the_count_goes_on() {
        let long = "x".repeat(10 * LONGEST_LINE);
        let text = format!("first\n{long}\nlast\n");
        let got = blocks(text.as_bytes(), 64);
        let joined: Vec<u8> = got.iter().flat_map(|b| b.text.clone()).collect();
        let lines: Vec<&[u8]> = joined.split(|&b| b == b'\n').collect();
        assert_eq!((lines[0], lines[2], lines.len()), (&b"first"[..], &b"last"[..], 4));
        assert!(lines[1].len() > LONGEST_LINE && lines[1].len() < 2 * LONGEST_LINE, "{}", lines[1].len());
        let b = got.last().unwrap();
        assert_eq!(b.offset + b.text.len() as u64, text.len() as u64, "offsets count what was cut");
    }

    #[test]
    fn byte_order_mark_and_magic() {
        let b = blocks(b"\xef\xbb\xbfa\n", 64);
        assert_eq!((b[0].offset, &b[0].text[..]), (3, &b"a\n"[..]));
        let error = BlockReader::new(Path::new("f.tsv"), &b"BZh9rest"[..], 64).next_block();
        let text = error.unwrap_err().to_string();
        assert_eq!(
            text,
            "f.tsv: is bzip2-compressed, expected plain text; decompress it first (bunzip2 -k f.tsv)"
        );
        assert!(blocks(b"", 64).is_empty());
    }
}
