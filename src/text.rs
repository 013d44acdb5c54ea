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

/// The candidate nearest to a misspelt word, if one is near.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if word.len() > 64 {
        return None;
    }
    let limit = 1 + word.chars().count() / 4;
    let scored = candidates.into_iter().map(|c| (distance(&word.to_lowercase(), c), c));
    scored.filter(|(cost, _)| *cost <= limit).min_by_key(|(cost, _)| *cost).map(|(_, c)| c)
}

/// Edits (insert, delete, replace, swap of neighbours) between two words.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            rows[i][j] = match (i, j) {
                (0, _) => j,
                (_, 0) => i,
                _ => {
                    let replace = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                    let mut best = replace.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
                    if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                        best = best.min(rows[i - 2][j - 2] + 1);
                    }
                    best
                }
            };
        }
    }
    rows[a.len()][b.len()]
}

/// The name nearest to one that is missing: misspelt, or with something added (`user`, `user_id`).
pub fn nearest_name<'a>(name: &str, candidates: impl Iterator<Item = &'a str> + Clone) -> Option<&'a str> {
    let plain = |n: &str| n.to_lowercase().replace(|c: char| !c.is_alphanumeric(), "");
    let word = plain(name);
    let lower: Vec<(String, &str)> = candidates.clone().map(|c| (c.to_lowercase(), c)).collect();
    let near = nearest(name, lower.iter().map(|c| c.0.as_str()));
    let near = near.and_then(|n| lower.iter().find(|c| c.0 == n)).map(|c| c.1);
    let similar = |c: &&str| {
        let c = plain(c);
        c == word || (c.len().min(word.len()) > 2 && (c.contains(&word) || word.contains(&c)))
    };
    near.or_else(|| candidates.filter(similar).min_by_key(|c| c.len().abs_diff(name.len())))
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
    fn names_that_are_near() {
        let near = |name: &str| nearest_name(name, ["clicked", "city", "user_id", "Price"].into_iter());
        assert_eq!(
            (near("user"), near("price"), near("clickd")),
            (Some("user_id"), Some("Price"), Some("clicked"))
        );
        assert_eq!(near("weekday"), None);
    }

    #[test]
    fn bytes_for_people() {
        assert_eq!(human_bytes(7), "7 bytes");
        assert_eq!(human_bytes(1536), "1.5 KiB");
        assert_eq!(human_bytes(128 << 20), "128 MiB");
    }
}
