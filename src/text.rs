//! Numbers and errors as people read them, in the terminal, the dashboard and the page.

/// 1234567 → "1,234,567".
pub fn group(n: u64) -> String {
    let s = n.to_string();
    let mut out = String::new();
    for (i, c) in s.chars().enumerate() {
        if i > 0 && (s.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// An error with its causes, as one line. A cause that its context quotes already is not repeated.
pub fn error_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        if line.is_empty() {
            line = text;
        } else if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
    }
    line.split('\n').map(str::trim).filter(|part| !part.is_empty()).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn errors_are_one_line() {
        let error = anyhow::anyhow!("disk full\n  at byte 3\n").context("cannot write w").context("train");
        assert_eq!(error_line(&error), "train: cannot write w: disk full; at byte 3");
        let quoted: anyhow::Result<()> = Err(anyhow::anyhow!("disk full"));
        let error = quoted.context("w: disk full").expect_err("error");
        assert_eq!(error_line(&error), "w: disk full");
    }
}
