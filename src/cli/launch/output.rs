//! What ranks print: lines of others are marked with their rank, and no two lines are ever mixed.

use crate::sync::lock;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::sync::{Arc, Mutex};

/// A line longer than this is written in pieces.
const LONGEST: usize = 1 << 20;

/// Lines that are kept of a rank that is not shown.
const KEPT: usize = 10;

/// Erases what stands on the terminal's current line, rank 0's progress bar: it draws itself again.
const ERASE: &[u8] = b"\r\x1b[K";

/// Where a line goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum To {
    /// Standard output: results.
    Out,
    /// Standard error: messages.
    Err,
}

/// The launcher's two outputs, written whole line by whole line.
pub struct Printer {
    sinks: Mutex<[Box<dyn Write + Send>; 2]>,
    terminal: [bool; 2],
}

impl std::fmt::Debug for Printer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Printer").field("terminal", &self.terminal).finish_non_exhaustive()
    }
}

impl Printer {
    /// The program's own outputs.
    pub fn standard() -> Self {
        let terminal = [io::stdout().is_terminal(), io::stderr().is_terminal()];
        Self { sinks: Mutex::new([Box::new(io::stdout()), Box::new(io::stderr())]), terminal }
    }

    /// All of it to standard error: standard output is for something else.
    pub fn messages() -> Self {
        let sinks: [Box<dyn Write + Send>; 2] = [Box::new(io::stderr()), Box::new(io::stderr())];
        Self { sinks: Mutex::new(sinks), terminal: [false, io::stderr().is_terminal()] }
    }

    /// Others, which are no terminals.
    pub fn new(out: Box<dyn Write + Send>, err: Box<dyn Write + Send>) -> Self {
        Self { sinks: Mutex::new([out, err]), terminal: [false; 2] }
    }

    /// Whether a rank may be given this output as its own: on a terminal rank 0 draws its progress bar.
    pub fn is_terminal(&self, to: To) -> bool {
        self.terminal[to as usize]
    }

    /// Writes whole lines in one piece.
    pub fn write(&self, to: To, lines: &[u8]) -> io::Result<()> {
        let mut sinks = lock(&self.sinks);
        let sink = &mut sinks[to as usize];
        match self.terminal[to as usize] {
            true => sink.write_all(&[ERASE, lines].concat())?,
            false => sink.write_all(lines)?,
        }
        sink.flush()
    }

    /// A message of the launcher itself. Where nobody listens any more, ranks go on all the same.
    pub fn say(&self, text: &str) {
        let _ = self.write(To::Err, format!("launch: {text}\n").as_bytes());
    }
}

/// How much of a rank is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Show {
    /// Everything, as it is: rank 0.
    Plain,
    /// Everything, each line with the rank before it.
    Marked,
    /// Lines that report an error, with the rank before them.
    Errors,
    /// Nothing: there is a file to read.
    Nothing,
}

/// The last lines of a rank that were not shown.
#[derive(Clone, Debug, Default)]
pub struct Tail(Arc<Mutex<VecDeque<String>>>);

impl Tail {
    fn keep(&self, line: &[u8]) {
        let mut lines = lock(&self.0);
        if lines.len() == KEPT {
            lines.pop_front();
        }
        lines.push_back(String::from_utf8_lossy(line).into_owned());
    }

    /// Takes them.
    pub fn take(&self) -> Vec<String> {
        lock(&self.0).drain(..).collect()
    }
}

/// Reads one output of one rank to its end.
#[derive(Debug)]
pub struct Pump {
    /// Of the whole group.
    pub rank: usize,
    /// Which of the launcher's outputs it belongs to.
    pub to: To,
    /// What is shown of it.
    pub show: Show,
    /// Where it is written besides, as it is.
    pub file: Option<Arc<Mutex<File>>>,
    /// Keeps what is not shown.
    pub tail: Tail,
    /// The launcher's outputs.
    pub printer: Arc<Printer>,
}

impl Pump {
    /// Until the rank closes it, or the launcher's own output is closed: then the rank finds its own closed as well.
    pub fn run(&self, mut from: impl Read) -> io::Result<()> {
        let mut buffer = vec![];
        let mut chunk = vec![0; 1 << 16];
        loop {
            let n = match from.read(&mut chunk) {
                Ok(0) => break,
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            let new = buffer.len();
            buffer.extend_from_slice(&chunk[..n]);
            if let Some(end) = buffer[new..].iter().rposition(|&b| b == b'\n') {
                self.lines(&buffer[..=new + end])?;
                buffer.drain(..=new + end);
            } else if buffer.len() >= LONGEST {
                if self.show == Show::Plain {
                    self.lines(&buffer)?;
                } else {
                    buffer.push(b'\n');
                    self.lines(&buffer)?;
                }
                buffer.clear();
            }
        }
        if buffer.is_empty() {
            return Ok(());
        }
        if self.show != Show::Plain {
            buffer.push(b'\n');
        }
        self.lines(&buffer)
    }

    /// Some whole lines.
    fn lines(&self, lines: &[u8]) -> io::Result<()> {
        if let Some(file) = &self.file {
            // one that is full must not end the run
            let _ = lock(file).write_all(lines);
        }
        if self.show == Show::Plain {
            return self.printer.write(self.to, lines);
        }
        let mut text = vec![];
        for line in lines.split_inclusive(|&b| b == b'\n') {
            let line = after_return(line);
            let shown = match self.show {
                Show::Errors => self.to == To::Err && is_error(line),
                show => show == Show::Marked,
            };
            match shown {
                true => {
                    text.extend_from_slice(format!("[rank {}] ", self.rank).as_bytes());
                    text.extend_from_slice(line);
                    text.push(b'\n');
                }
                false => self.tail.keep(line),
            }
        }
        match text.is_empty() {
            true => Ok(()),
            false => self.printer.write(self.to, &text),
        }
    }
}

/// A line without its end, and without what a carriage return took back: earlier states of a progress bar.
fn after_return(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let begin = line.iter().rposition(|&b| b == b'\r').map_or(0, |i| i + 1);
    line[begin..].strip_prefix(b"\x1b[K").unwrap_or(&line[begin..])
}

/// Whether a line of standard error tells of an error, as this program and a Rust panic do.
fn is_error(line: &[u8]) -> bool {
    line.starts_with(b"error") || line.windows(11).any(|w| w == b"panicked at")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sink to look into.
    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            lock(&self.0).extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn pumped(show: Show, to: To, input: &[u8], chunk: usize) -> (String, Vec<String>) {
        /// Returns a few bytes at a time.
        struct Slow<'a>(&'a [u8], usize);
        impl Read for Slow<'_> {
            fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
                let n = self.1.min(self.0.len());
                to[..n].copy_from_slice(&self.0[..n]);
                self.0 = &self.0[n..];
                Ok(n)
            }
        }
        let sink = Shared::default();
        let printer = Arc::new(Printer::new(Box::new(sink.clone()), Box::new(sink.clone())));
        let tail = Tail::default();
        let pump = Pump { rank: 2, to, show, file: None, tail: tail.clone(), printer };
        pump.run(Slow(input, chunk)).unwrap();
        let text = String::from_utf8(lock(&sink.0).clone()).unwrap();
        (text, tail.take())
    }

    #[test]
    fn lines_are_marked_whatever_pieces_they_come_in() {
        for chunk in [1, 2, 3, 5, 7, 1000] {
            let text = pumped(Show::Marked, To::Out, b"one\n\ntwo\r\n 10 %\r 20 %\r 30 %\nlast", chunk).0;
            assert_eq!(text, "[rank 2] one\n[rank 2] \n[rank 2] two\n[rank 2]  30 %\n[rank 2] last\n");
        }
    }

    #[test]
    fn rank_0_is_passed_on_byte_for_byte() {
        let bytes = b"a\r\nb\r b\n\x00\x01last";
        for chunk in [1, 4, 1000] {
            assert_eq!(pumped(Show::Plain, To::Out, bytes, chunk).0.as_bytes(), bytes);
        }
    }

    #[test]
    fn a_quiet_rank_shows_its_errors_and_keeps_the_end_of_the_rest() {
        let mut input: String = (0..20).map(|i| format!("line {i}\n")).collect();
        input += "error: it broke\nthread 'main' panicked at src/x.rs:1:1:\nwhy\n";
        let (text, tail) = pumped(Show::Errors, To::Err, input.as_bytes(), 16);
        assert_eq!(text, "[rank 2] error: it broke\n[rank 2] thread 'main' panicked at src/x.rs:1:1:\n");
        assert_eq!((tail.len(), tail[0].as_str(), tail[9].as_str()), (KEPT, "line 11", "why"));
        assert_eq!(pumped(Show::Errors, To::Out, b"error: no, a result\n", 99).0, "");
    }

    #[test]
    fn a_line_without_end_does_not_fill_the_memory() {
        let text = pumped(Show::Marked, To::Err, &vec![b'x'; LONGEST + 5], 1 << 16).0;
        let lengths: Vec<usize> = text.lines().map(|l| l.trim_start_matches("[rank 2] ").len()).collect();
        assert_eq!(lengths, [LONGEST, 5]);
    }
}
