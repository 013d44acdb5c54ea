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

/// `1536` as `1.5 KiB`.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{bytes} bytes")
    } else if value.fract() == 0.0 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
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

    #[test]
    fn bytes_for_people() {
        assert_eq!(human_bytes(7), "7 bytes");
        assert_eq!(human_bytes(1536), "1.5 KiB");
        assert_eq!(human_bytes(128 << 20), "128 MiB");
    }
}
