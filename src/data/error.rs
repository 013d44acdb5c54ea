//! Errors of reading data: each prints as one line that names the place and what to do.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// What is wrong with one row.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RowProblem {
    /// Another number of fields than expected.
    #[error("{found} fields, expected {expected}; check for missing or extra {delimiter} in this line")]
    FieldCount {
        /// Fields in the line.
        found: usize,
        /// The count that fits, in words.
        expected: String,
        /// What separates fields, in words.
        delimiter: &'static str,
    },
    /// A line without any text.
    #[error("empty line, expected {expected}; delete the line")]
    EmptyLine {
        /// The fields that fit, in words.
        expected: String,
    },
    /// A numeric field that is not a number.
    #[error("column {column}: {value} is not a number, expected {}; {advice}", number_words(*.integer))]
    BadNumber {
        /// Column name.
        column: String,
        /// The field's text, escaped and shortened.
        value: String,
        /// Whether the format has whole numbers only.
        integer: bool,
        /// What to do.
        advice: String,
    },
    /// A number that 32 bits cannot hold.
    #[error(
        "column {column}: {value} is too large a number, expected one between -3.4e38 and 3.4e38 (f32); correct the value, \
         or make the column categorical"
    )]
    TooLarge {
        /// Column name.
        column: String,
        /// The field's text, escaped and shortened.
        value: String,
    },
    /// A label that is neither 0 nor 1, or that its rule cannot compare.
    #[error("column {column}: {value} is not a label, expected {expected}")]
    BadLabel {
        /// Column name.
        column: String,
        /// The field's text, escaped and shortened.
        value: String,
        /// What fits and what to do.
        expected: String,
    },
    /// No label where training or evaluation needs one.
    #[error(
        "column {column}: no label, expected 0 or 1; give a labelled file (only predict works without labels)"
    )]
    NoLabel {
        /// Column name.
        column: String,
    },
    /// A row without a label in a file that has labels, or the reverse.
    #[error("column {column}: {found}, but {most}; give every row a label, or none")]
    MixedLabels {
        /// Column name.
        column: String,
        /// What this row has.
        found: &'static str,
        /// What most rows of the file have.
        most: &'static str,
    },
    /// A weight that is no positive number.
    #[error("column {column}: {value} is not a weight, expected a number of 0 or more; correct the value")]
    BadWeight {
        /// Column name.
        column: String,
        /// The field's text, escaped and shortened.
        value: String,
    },
    /// A value of the split's time column that is neither a number nor a date.
    #[error(
        "column {column}: {value} is not a time, expected a number or a date such as 2024-05-31 12:00:00"
    )]
    BadTime {
        /// Column name.
        column: String,
        /// The field's text, escaped and shortened.
        value: String,
    },
    /// Bytes that are not UTF-8.
    #[error(
        "column {column}: byte 0x{byte:02x} at offset {offset} of the file is not UTF-8, expected UTF-8 text; \
         convert the file (iconv -t UTF-8), or name its character set (data.encoding = \"latin1\")"
    )]
    NotUtf8 {
        /// Column name, or `line` where the line has another number of fields.
        column: String,
        /// Offset of the byte from the start of the file.
        offset: u64,
        /// The offending byte.
        byte: u8,
    },
    /// A quoted field that does not end before the file (or the longest record) does.
    #[error(
        "column {column}: a quote is never closed; close it, or set data.quote = \"\" if quotes mean nothing here"
    )]
    OpenQuote {
        /// Column name.
        column: String,
    },
    /// Text between the end of a quoted field and the next delimiter.
    #[error(
        "column {column}: text after a closing quote; double the quotes inside a quoted field, or set data.quote = \"\" if quotes mean nothing here"
    )]
    AfterQuote {
        /// Column name.
        column: String,
    },
    /// A feature of a libsvm or libffm line that cannot be read.
    #[error("token {token}: {value} is not {expected}")]
    BadToken {
        /// Number of the token in the line, the label being 0.
        token: usize,
        /// Its text, escaped and shortened.
        value: String,
        /// What fits.
        expected: String,
    },
    /// A value of a columnar file that does not fit its column's kind.
    #[error("column {column}: {problem}")]
    Value {
        /// Column name.
        column: String,
        /// What is wrong.
        problem: String,
    },
    /// A line longer than any row can be.
    #[error("line longer than {limit} bytes, expected one row a line; is this a text file with line breaks?")]
    TooLong {
        /// The longest line that is read.
        limit: usize,
    },
}

impl RowProblem {
    /// The kind of problem, for counting.
    pub fn kind(&self) -> &'static str {
        match self {
            RowProblem::FieldCount { .. } => "another number of fields",
            RowProblem::EmptyLine { .. } => "empty line",
            RowProblem::BadNumber { .. } => "not a number",
            RowProblem::TooLarge { .. } => "too large a number",
            RowProblem::BadLabel { .. } => "not a label",
            RowProblem::NoLabel { .. } => "no label",
            RowProblem::MixedLabels { .. } => "labels in some rows only",
            RowProblem::BadWeight { .. } => "not a weight",
            RowProblem::BadTime { .. } => "not a time",
            RowProblem::NotUtf8 { .. } => "not UTF-8",
            RowProblem::OpenQuote { .. } => "quote never closed",
            RowProblem::AfterQuote { .. } => "text after a closing quote",
            RowProblem::BadToken { .. } => "bad feature",
            RowProblem::Value { .. } => "bad value",
            RowProblem::TooLong { .. } => "line too long",
        }
    }
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
        expected: String,
    },
    /// The file's columns are not the schema's, or its format is not what it was said to be.
    #[error("{}: {problem}", At(.path, *.line))]
    Columns {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: u64,
        /// What is wrong, what was expected, what to do.
        problem: String,
    },
    /// The file's format cannot be told, or cannot be read.
    #[error("{}: {problem}", Shown(.path))]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        problem: String,
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
    #[error("{}: {problem}", At(.path, *.line))]
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
    /// A file that is read more than once is another than at first.
    #[error(
        "{}: changed while it was read: {what}; train on a file that nothing writes to, such as a copy of it", Shown(.path)
    )]
    Changed {
        /// The file.
        path: PathBuf,
        /// What is different, in words.
        what: String,
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

fn number_words(integer: bool) -> &'static str {
    if integer { "an integer or an empty field" } else { "a decimal number or an empty field" }
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

/// A line of a file; of standard input in words.
struct At<'a>(&'a Path, u64);

impl fmt::Display for At<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stdin = self.0.as_os_str() == super::input::STDIN;
        let line = if stdin { ", line " } else { ":" };
        write!(f, "{}{line}{}", Shown(self.0), self.1)
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
        let problem = RowProblem::BadNumber {
            column: "I3".into(),
            value: quoted(b"1\n2\x1b[31m"),
            integer: true,
            advice: "correct the value".into(),
        };
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
