//! What a file's bytes are: said by the configuration, or told from the first of them.

use serde::{Deserialize, Serialize};

use super::blocks::Quoting;

/// Formats by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FormatName {
    /// Told from the content.
    #[default]
    Auto,
    /// Criteo's click log.
    Criteo,
    /// Comma-separated, or by another delimiter.
    Csv,
    /// Tab-separated.
    Tsv,
    /// `label index:value …`.
    Libsvm,
    /// `label field:index:value …`.
    Libffm,
    /// Apache Parquet.
    Parquet,
    /// Arrow IPC, a file or a stream.
    Arrow,
}

/// What the configuration says about files; `None` is told from the content.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FormatOptions {
    /// The format.
    pub format: FormatName,
    /// Between fields.
    pub delimiter: Option<u8>,
    /// Around fields; `Some(None)`: quotes mean nothing.
    pub quote: Option<Option<u8>>,
    /// Whether the first line has the columns' names.
    pub header: Option<bool>,
    /// Lines that start with it are left out; empty: none.
    pub comment: String,
    /// Further texts that mean "missing", besides the empty field.
    pub na: Vec<String>,
    /// Character set; empty: UTF-8.
    pub encoding: String,
    /// Whether blanks around fields without quotes are part of neither name nor value.
    pub trim: bool,
}

/// Delimited text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delimited {
    /// Between fields.
    pub delimiter: u8,
    /// Around fields.
    pub quote: Option<u8>,
    /// Whether the first line has the columns' names; `None`: as the schema and the line say.
    pub header: Option<bool>,
    /// Whether it is Criteo's log, whose columns are known.
    pub criteo: bool,
    /// Whether blanks around fields without quotes are left out.
    pub trim: bool,
}

impl Delimited {
    /// Criteo's log.
    pub const CRITEO: Delimited =
        Delimited { delimiter: b'\t', quote: None, header: Some(false), criteo: true, trim: false };

    /// How records end.
    pub fn quoting(&self) -> Option<Quoting> {
        self.quote.map(|quote| Quoting { delimiter: self.delimiter, quote, trim: self.trim })
    }

    /// What separates fields, for messages.
    pub fn delimiters(&self) -> &'static str {
        match self.delimiter {
            b'\t' => "tabs",
            b',' => "commas",
            b';' => "semicolons",
            b'|' => "bars",
            b' ' => "spaces",
            _ => "delimiters",
        }
    }
}

/// A format with every choice made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Format {
    /// Text in fields.
    Delimited(Delimited),
    /// `label index:value …`, or with `fields`, `label field:index:value …`.
    Sparse {
        /// libffm rather than libsvm.
        fields: bool,
    },
    /// Apache Parquet.
    Parquet,
    /// Arrow IPC.
    Arrow {
        /// A stream rather than a file with a footer.
        stream: bool,
    },
}

impl Format {
    /// For people: `CSV (commas, header)`.
    pub fn describe(&self) -> String {
        match self {
            Format::Delimited(d) if d.criteo => "Criteo TSV (label, I1..I13, C1..C26)".into(),
            Format::Delimited(d) => {
                let header = match d.header {
                    Some(true) => ", header",
                    Some(false) => ", no header",
                    None => "",
                };
                format!("text ({}{header})", d.delimiters())
            }
            Format::Sparse { fields: true } => "libffm (label field:index:value …)".into(),
            Format::Sparse { fields: false } => "libsvm (label index:value …)".into(),
            Format::Parquet => "Parquet".into(),
            Format::Arrow { stream: true } => "Arrow IPC stream".into(),
            Format::Arrow { stream: false } => "Arrow IPC file".into(),
        }
    }
}

/// The format of a file that starts with `head` (decompressed), where the options leave it open. The error
/// says what could not be told.
pub fn resolve(head: &[u8], o: &FormatOptions) -> Result<Format, String> {
    let text = |default: u8, header: Option<bool>| {
        let delimiter = o.delimiter.unwrap_or(default);
        let quote = o.quote.unwrap_or((delimiter != b'\t').then_some(b'"'));
        Format::Delimited(Delimited {
            delimiter,
            quote,
            header: o.header.or(header),
            criteo: false,
            trim: o.trim,
        })
    };
    let as_text = matches!(o.format, FormatName::Criteo | FormatName::Csv | FormatName::Tsv);
    let told = [(&b"PAR1"[..], "Parquet"), (b"ARROW1", "Arrow IPC"), (&[0xff; 4], "Arrow IPC")];
    if let Some((_, kind)) = told.iter().find(|(magic, _)| as_text && head.starts_with(magic)) {
        return Err(format!(
            "is {kind}, but is to be read as text: --format auto (eval, predict), or --set data.format=auto"
        ));
    }
    let wide = head.starts_with(b"\xff\xfe") || head.starts_with(b"\xfe\xff");
    if wide && !head.starts_with(&[0xff; 4]) && o.encoding.is_empty() {
        return Err(
            "is UTF-16 text; say so: --set data.encoding=utf-16 (eval, predict: --encoding utf-16)".into()
        );
    }
    Ok(match o.format {
        FormatName::Criteo => Format::Delimited(Delimited::CRITEO),
        FormatName::Csv => text(guess_delimiter(head, o).unwrap_or(b','), None),
        FormatName::Tsv => text(b'\t', None),
        FormatName::Libsvm => Format::Sparse { fields: false },
        FormatName::Libffm => Format::Sparse { fields: true },
        FormatName::Parquet => Format::Parquet,
        FormatName::Arrow => Format::Arrow { stream: !head.starts_with(b"ARROW1") },
        FormatName::Auto => {
            if head.starts_with(b"PAR1") {
                Format::Parquet
            } else if head.starts_with(b"ARROW1") {
                Format::Arrow { stream: false }
            } else if head.starts_with(&[0xff; 4]) {
                Format::Arrow { stream: true }
            } else if o.delimiter.is_none() && o.header.is_none() && is_criteo(head) {
                Format::Delimited(Delimited::CRITEO)
            } else if let Some(fields) = sparse(head, o) {
                Format::Sparse { fields }
            } else if let Some(delimiter) = o.delimiter.or_else(|| guess_delimiter(head, o)) {
                text(delimiter, None)
            } else {
                return Err(
                    "cannot tell the format: no delimiter (tab, comma, semicolon, bar) occurs equally often in its first lines; \
                     set data.format and data.delimiter (criteo, csv, tsv, libsvm, libffm, parquet, arrow)"
                        .into(),
                );
            }
        }
    })
}

/// The first whole lines of a text, without comments.
fn lines<'a>(head: &'a [u8], o: &'a FormatOptions) -> impl Iterator<Item = &'a [u8]> {
    let head = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head);
    let lines = head.split(|&b| b == b'\n').map(|l| l.strip_suffix(b"\r").unwrap_or(l));
    let comment = move |l: &&[u8]| !o.comment.is_empty() && l.starts_with(o.comment.as_bytes());
    lines.filter(move |l| !l.is_empty() && !comment(l)).take(64)
}

/// Most of the first lines look like Criteo's: 40 fields, a label, 13 integers.
fn is_criteo(head: &[u8]) -> bool {
    let o = FormatOptions::default();
    let (mut good, mut all) = (0, 0);
    for line in lines(head, &o) {
        let fields: Vec<&[u8]> = line.split(|&b| b == b'\t').collect();
        let numbers = |f: &[&[u8]]| f.iter().all(|v| v.iter().all(|b| b.is_ascii_digit() || *b == b'-'));
        all += 1;
        good += usize::from(match fields.len() {
            40 => matches!(fields[0], b"0" | b"1" | b"") && numbers(&fields[1..14]),
            39 => numbers(&fields[..13]),
            _ => false,
        });
    }
    good * 2 > all
}

/// libsvm (`Some(false)`) or libffm (`Some(true)`): a number, then pairs or triples; or, to be scored, pairs or
/// triples of numbers alone.
fn sparse(head: &[u8], o: &FormatOptions) -> Option<bool> {
    let (mut pairs, mut triples, mut all) = (0, 0, 0);
    for line in lines(head, o) {
        let Ok(line) = std::str::from_utf8(line) else { return None };
        let mut tokens = line.split_ascii_whitespace();
        let numbers = |t: &str, n: usize| {
            t.matches(':').count() == n
                && t.rsplit(':').skip(1).all(|i| !i.is_empty() && i.bytes().all(|b| b.is_ascii_digit()))
                && t.rsplit(':').next().is_some_and(|v| v.parse::<f64>().is_ok())
        };
        let alone = |n| {
            let mut features = tokens.clone().filter(|t| !t.starts_with("qid:")).peekable();
            features.peek().is_some() && features.all(|t| numbers(t, n))
        };
        pairs += usize::from(alone(1));
        triples += usize::from(alone(2));
        let label = tokens.next().is_some_and(|t| t.parse::<f64>().is_ok());
        let rest: Vec<usize> = tokens.map(|t| t.matches(':').count()).collect();
        all += 1;
        if label && !rest.is_empty() {
            pairs += usize::from(rest.iter().all(|&n| n == 1));
            triples += usize::from(rest.iter().all(|&n| n == 2));
        }
    }
    if pairs * 2 > all { Some(false) } else { (triples * 2 > all).then_some(true) }
}

/// The delimiter that most records have in the same number, the more the better; a quoted field may hold anything.
fn guess_delimiter(head: &[u8], o: &FormatOptions) -> Option<u8> {
    let quote = o.quote.unwrap_or(Some(b'"'));
    let score = |d: u8| {
        let format = Delimited { delimiter: d, quote, header: None, criteo: false, trim: o.trim };
        let records = super::delimited::sample(head, &format, o.comment.as_bytes(), 64);
        let mut counts: Vec<usize> = records.iter().map(|r| r.values.len() - 1).collect();
        counts.sort_unstable();
        let typical = *counts.get(counts.len() / 2)?;
        let alike = counts.iter().filter(|&&c| c == typical).count();
        (typical > 0 && alike * 5 >= counts.len() * 4).then_some((alike * 100 / counts.len(), typical, d))
    };
    let whole = Delimited { delimiter: b'\t', quote, header: None, criteo: false, trim: o.trim };
    if super::delimited::sample(head, &whole, o.comment.as_bytes(), 1).is_empty() {
        // the first line is longer than what is looked at
        let count = |d: &u8| head.iter().filter(|b| *b == d).count();
        return b"\t,;|".iter().copied().max_by_key(count).filter(|d| count(d) > 0);
    }
    let best =
        b"\t,;|".iter().filter_map(|&d| score(d)).max_by_key(|&(alike, typical, _)| (alike / 10, typical));
    best.map(|s| s.2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn auto(head: &str) -> Result<Format, String> {
        resolve(head.as_bytes(), &FormatOptions::default())
    }

    fn delimiter(head: &str) -> u8 {
        match auto(head) {
            Ok(Format::Delimited(d)) => d.delimiter,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn formats_are_told_from_content() {
        let criteo = format!("1\t{}\t{}\n", ["2"; 13].join("\t"), ["ab"; 26].join("\t")).repeat(3);
        assert_eq!(auto(&criteo), Ok(Format::Delimited(Delimited::CRITEO)));
        assert_eq!(delimiter("a,b\n1,\"x,y;z\"\n2,3\n"), b',');
        assert_eq!(delimiter("1;2,5;3\n4;5,5;6\n"), b';');
        assert_eq!(delimiter("1|Toy, Story|x\n2|b|c\n"), b'|');
        assert_eq!(delimiter("196\t242\t3\n186\t302\t3\n"), b'\t');
        assert_eq!(auto("1 3:1 7:0.5\n0 2:1\n"), Ok(Format::Sparse { fields: false }));
        assert_eq!(auto("1 0:3:1 1:7:0.5\n0 0:2:1\n"), Ok(Format::Sparse { fields: true }));
        assert_eq!(auto("3:1 7:0.5\nqid:1 2:1\n"), Ok(Format::Sparse { fields: false }));
        assert_eq!(auto("0:3:1 1:7:0.5\n0:2:1\n"), Ok(Format::Sparse { fields: true }));
        assert_eq!(delimiter("12:30,5\n12:45,7\n"), b',');
        assert_eq!(auto("PAR1...."), Ok(Format::Parquet));
        assert_eq!(auto("ARROW1\0\0"), Ok(Format::Arrow { stream: false }));
        let csv = FormatOptions { format: FormatName::Csv, ..Default::default() };
        assert!(resolve(b"PAR1....", &csv).unwrap_err().contains("is Parquet, but"));
        assert!(resolve(b"\xff\xfea\0,\0", &csv).unwrap_err().contains("encoding utf-16"));
        assert!(auto("one word\nanother, here\nthird\n").unwrap_err().contains("set data.format"));
        let o = FormatOptions { format: FormatName::Csv, delimiter: Some(b':'), ..Default::default() };
        assert!(matches!(resolve(b"a:b\n", &o), Ok(Format::Delimited(Delimited { delimiter: b':', .. }))));
        let o = FormatOptions { comment: "#".into(), ..Default::default() };
        assert!(matches!(
            resolve(b"# x\n# y\na,b\n", &o),
            Ok(Format::Delimited(Delimited { delimiter: b',', .. }))
        ));
    }
}
