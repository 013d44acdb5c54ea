//! Errors of reading data: each prints as one line that names the place and what to do.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// What is wrong with one row.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RowProblem {
    /// Another number of tab-separated fields than expected.
    #[error("{found} fields, expected {expected}; check for missing or extra tabs in this line")]
    FieldCount {
        /// Fields in the line.
        found: usize,
        /// The count that fits, in words.
        expected: &'static str,
    },
    /// A line without any text.
    #[error("empty line, expected {expected}; delete the line")]
    EmptyLine {
        /// The fields that fit, in words.
        expected: &'static str,
    },
    /// A numeric field that is not a number.
    #[error(
        "column {column}: {value} is not a number, expected an integer or an empty field; correct the value"
    )]
    BadNumber {
        /// Column name.
        column: String,
        /// The field's text, escaped and shortened.
        value: String,
    },
    /// A label that is neither 0 nor 1.
    #[error("column label: {value} is not a label, expected 0 or 1; correct the value")]
    BadLabel {
        /// The field's text, escaped and shortened.
        value: String,
    },
    /// No label where training or evaluation needs one.
    #[error(
        "column label: no label, expected 0 or 1; give a labelled file (only predict works without labels)"
    )]
    NoLabel,
    /// A row without a label in a file that has labels, or the reverse.
    #[error("column label: {found}, but {most}; give every row a label, or none")]
    MixedLabels {
        /// What this row has.
        found: &'static str,
        /// What most rows of the file have.
        most: &'static str,
    },
    /// Bytes that are not UTF-8.
    #[error(
        "column {column}: byte 0x{byte:02x} at offset {offset} of the file is not UTF-8, expected UTF-8 text; convert the file (iconv -t UTF-8)"
    )]
    NotUtf8 {
        /// Column name, or `line` where the line has another number of fields.
        column: String,
        /// Offset of the byte from the start of the file.
        offset: u64,
        /// The offending byte.
        byte: u8,
    },
    /// A line longer than any row can be.
    #[error("line longer than {limit} bytes, expected one row a line; is this a text file with line breaks?")]
    TooLong {
        /// The longest line that is read.
        limit: usize,
    },
}

/// An error of a data file or of a file derived from one.
#[derive(Debug, Error)]
pub enum DataError {
    /// The path names nothing.
    #[error("{}: no such file; check the path", Shown(.path))]
    NotFound {
        /// The file.
        path: PathBuf,
    },
    /// The path names a directory.
    #[error("{}: is a directory, expected a file; name one file in it", Shown(.path))]
    Directory {
        /// The directory.
        path: PathBuf,
    },
    /// The content is compressed or binary.
    #[error("{}: is {kind}, expected plain text; {remedy}", Shown(.path))]
    NotPlainText {
        /// The file.
        path: PathBuf,
        /// What the first bytes say it is.
        kind: &'static str,
        /// What to do, with the command.
        remedy: String,
    },
    /// The file has no row.
    #[error("{}: no rows, expected {expected}; is this the right file?", Shown(.path))]
    Empty {
        /// The file.
        path: PathBuf,
        /// What a row looks like.
        expected: &'static str,
    },
    /// Every row was bad, and bad rows are skipped.
    #[error("{}: none of {skipped} rows can be used; the first: {first}", Shown(.path))]
    AllSkipped {
        /// The file.
        path: PathBuf,
        /// Rows seen.
        skipped: u64,
        /// The first bad row's line and problem.
        first: String,
    },
    /// A bad row.
    #[error("{}:{line}: {problem}", Shown(.path))]
    Row {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: u64,
        /// What is wrong.
        problem: RowProblem,
    },
    /// The operating system's error on a file.
    #[error("{}: cannot {action}: {source}", Shown(.path))]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried: "read", "write", …
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// A schema that cannot be used.
    #[error("schema: column {column}: {problem}")]
    Schema {
        /// Column name.
        column: String,
        /// What is wrong and what would fit.
        problem: String,
    },
    /// A damaged vocabulary file, or one that was fitted for another schema.
    #[error("{}:{line}: {problem}", Shown(.path))]
    Encoder {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: u64,
        /// What is wrong and what to do.
        problem: String,
    },
    /// More rows, values or table rows than ids can count.
    #[error("{what}: {count} is more than {limit}; {remedy}")]
    TooMany {
        /// What was counted.
        what: String,
        /// The count.
        count: u64,
        /// The largest that fits.
        limit: u64,
        /// What to do.
        remedy: &'static str,
    },
    /// A batch size or an embedding layout that cannot be.
    #[error("batch: {problem}")]
    Batch {
        /// What is wrong and what would fit.
        problem: String,
    },
    /// The loader thread could not start, or panicked.
    #[error("the data loader thread failed: {problem}; if this repeats, please report it")]
    Loader {
        /// The panic's message.
        problem: String,
    },
}

impl DataError {
    /// An I/O error with the file and what was tried; the common kinds get their own words.
    pub(crate) fn io(path: &Path, action: &'static str, source: io::Error) -> DataError {
        let path = path.to_path_buf();
        match source.kind() {
            io::ErrorKind::NotFound if action == "read" => DataError::NotFound { path },
            io::ErrorKind::NotFound => {
                let source = io::Error::other("its folder does not exist, create it first");
                DataError::Io { path, action, source }
            }
            io::ErrorKind::IsADirectory => DataError::Directory { path },
            _ => DataError::Io { path, action, source },
        }
    }
}

/// A path without control characters, so that an error stays on one line.
struct Shown<'a>(&'a Path);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.to_string_lossy().chars() {
            if c.is_control() { write!(f, "{}", c.escape_default())? } else { write!(f, "{c}")? }
        }
        Ok(())
    }
}

/// A field's text in quotes, escaped, cut to a length that fits on a line.
pub(crate) fn quoted(field: &[u8]) -> String {
    const LONGEST: usize = 40;
    let text: String = String::from_utf8_lossy(&field[..field.len().min(4 * LONGEST)]).into_owned();
    let cut: String = text.chars().take(LONGEST).collect();
    let dots = if text.chars().count() > LONGEST { "…" } else { "" };
    format!("{cut:?}{dots}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_stay_on_one_line() {
        let path = PathBuf::from("a\nb\t.tsv");
        let problem = RowProblem::BadNumber { column: "I3".into(), value: quoted(b"1\n2\x1b[31m") };
        let text = DataError::Row { path, line: 7, problem }.to_string();
        assert_eq!(
            text,
            "a\\nb\\t.tsv:7: column I3: \"1\\n2\\u{1b}[31m\" is not a number, \
             expected an integer or an empty field; correct the value"
        );
        assert!(quoted(&[b'x'; 5000]).chars().count() < 50);
        assert!(quoted(&[0xff; 50]).ends_with('…'));
    }
}
