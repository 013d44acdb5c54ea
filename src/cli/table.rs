//! Tables for the terminal, and the same as CSV.

use super::output;
use std::path::Path;

/// A table: a head and rows of equal length.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// Titles of the columns.
    pub head: Vec<String>,
    /// Cells.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    pub fn new<S: Into<String>>(head: impl IntoIterator<Item = S>) -> Self {
        Table { head: head.into_iter().map(Into::into).collect(), rows: vec![] }
    }

    /// Prints to stdout: numbers to the right, anything else to the left.
    pub fn print(&self) -> anyhow::Result<()> {
        self.lines().iter().try_for_each(|l| output::line(l))
    }

    /// The lines that [`Table::print`] prints.
    pub fn lines(&self) -> Vec<String> {
        let all = || std::iter::once(&self.head).chain(&self.rows);
        let columns = self.head.len();
        let width: Vec<usize> =
            (0..columns).map(|c| all().map(|r| r[c].chars().count()).max().unwrap_or(0)).collect();
        let right: Vec<bool> = (0..columns).map(|c| self.rows.iter().all(|r| is_number(&r[c]))).collect();
        let line = |row: &Vec<String>| {
            let cells = row.iter().enumerate().map(|(c, text)| {
                let pad = " ".repeat(width[c] - text.chars().count());
                if right[c] { format!("{pad}{text}") } else { format!("{text}{pad}") }
            });
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        all().map(line).collect()
    }

    /// The table as CSV (RFC 4180).
    pub fn to_csv(&self) -> String {
        let line = |row: &Vec<String>| row.iter().map(|c| quoted(c)).collect::<Vec<_>>().join(",") + "\n";
        std::iter::once(&self.head).chain(&self.rows).map(line).collect()
    }

    /// Writes the CSV.
    pub fn write_csv(&self, path: &Path) -> anyhow::Result<()> {
        use std::io::Write;
        Ok(crate::train::run::write_atomic(path, |w| w.write_all(self.to_csv().as_bytes()))?)
    }
}

fn quoted(cell: &str) -> String {
    if cell.contains([',', '"', '\n', '\r']) {
        return format!("\"{}\"", cell.replace('"', "\"\""));
    }
    cell.to_owned()
}

/// `12`, `-0.31 %`, `0.8 ± 0.1`, `1,234`, and nothing at all.
fn is_number(cell: &str) -> bool {
    cell.chars().all(|c| c.is_ascii_digit() || " .,+-±%–".contains(c) || c.is_ascii_uppercase())
        && cell.chars().filter(char::is_ascii_uppercase).count() <= 1
}

/// 1234567 → "1.23 M": three significant digits, for parameters and FLOPs.
pub fn short(x: f64) -> String {
    for (unit, size) in [("G", 1e9), ("M", 1e6), ("k", 1e3)] {
        // 999,999 is 1 M, not 1000 k
        if x >= 0.9995 * size {
            let v = x / size;
            let digits = if v < 9.995 { 2 } else { usize::from(v < 99.95) };
            return format!("{v:.digits$} {unit}");
        }
    }
    format!("{x:.0}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut t = Table::new(["run", "NE", "of"]);
        t.rows.push(vec!["a".into(), "0.80".into(), "x, \"y\"".into()]);
        t.rows.push(vec!["bcd".into(), "–".into(), "z".into()]);
        assert_eq!(t.lines(), ["run    NE  of", "a    0.80  x, \"y\"", "bcd     –  z"]);
        assert_eq!(t.to_csv(), "run,NE,of\na,0.80,\"x, \"\"y\"\"\"\nbcd,–,z\n");
    }

    #[test]
    fn sizes_are_short() {
        let all = [(7.0, "7"), (999.4, "999"), (1234.0, "1.23 k"), (999_900.0, "1.00 M"), (2.5e10, "25.0 G")];
        for (x, text) in all {
            assert_eq!(short(x), text);
        }
    }
}
