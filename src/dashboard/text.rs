//! Numbers as people read them.

pub use crate::text::group;

/// At most four significant digits, without trailing zeros: 0.8765, 12.5, 3.2e-6.
pub fn number(x: f64) -> String {
    if !x.is_finite() {
        return if x.is_nan() { "undefined".into() } else { "infinite".into() };
    }
    let a = x.abs();
    if a != 0.0 && !(1e-3..1e5).contains(&a) {
        let s = format!("{x:.2e}");
        return s.replace(".00e", "e");
    }
    let digits = if a >= 1000.0 { 0 } else { (3 - a.max(1e-3).log10().floor() as i32).clamp(0, 6) as usize };
    trim(format!("{x:.digits$}"))
}

fn trim(s: String) -> String {
    if s.contains('.') { s.trim_end_matches('0').trim_end_matches('.').to_string() } else { s }
}

/// With a unit prefix: 12.3k, 4.5M, 1.2G.
pub fn short(x: f64) -> String {
    let (v, unit) = match x.abs() {
        a if a >= 1e12 => (x / 1e12, "T"),
        a if a >= 1e9 => (x / 1e9, "G"),
        a if a >= 1e6 => (x / 1e6, "M"),
        a if a >= 1e3 => (x / 1e3, "k"),
        _ => return number(x),
    };
    let digits = if v.abs() >= 100.0 { 0 } else { 1 };
    trim(format!("{v:.digits$}")) + unit
}

/// Bytes: 3.4 MiB.
pub fn bytes(x: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let k = if x >= 1.0 { ((x.log2() / 10.0) as usize).min(4) } else { 0 };
    let v = x / 1024f64.powi(k as i32);
    let digits = if k == 0 || v >= 100.0 { 0 } else { 1 };
    format!("{v:.digits$} {}", units[k])
}

/// A length of time: 850 ms, 12 s, 3 min 20 s, 2 h 5 min.
pub fn duration(seconds: f64) -> String {
    if !seconds.is_finite() {
        return "unknown".into();
    }
    let s = seconds.round() as u64;
    match s {
        _ if seconds < 1.0 => format!("{:.0} ms", seconds * 1e3),
        0..60 => format!("{s} s"),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        3600..86400 => format!("{} h {} min", s / 3600, s % 3600 / 60),
        _ => format!("{} d {} h", s / 86400, s % 86400 / 3600),
    }
}

/// A length of time in its largest unit: 20 s, 5 min, 4 h, 10 d.
pub fn duration_short(seconds: f64) -> String {
    let (v, unit) = match seconds {
        s if s < 60.0 => (s, "s"),
        s if s < 3600.0 => (s / 60.0, "min"),
        s if s < 86400.0 => (s / 3600.0, "h"),
        s => (s / 86400.0, "d"),
    };
    format!("{} {unit}", number((v * 100.0).round() / 100.0))
}

/// Microseconds: 12 µs, 3.4 ms, 1.2 s.
pub fn micros(us: f64) -> String {
    match us {
        _ if us < 1e3 => format!("{us:.0} µs"),
        _ if us < 1e6 => format!("{} ms", number((us / 10.0).round() / 100.0)),
        _ => format!("{} s", number((us / 1e4).round() / 100.0)),
    }
}

/// At most so many characters, the rest an ellipsis in the middle, where names differ least.
pub fn shorten(s: &str, most: usize) -> String {
    let c: Vec<char> = s.chars().collect();
    if c.len() <= most || most < 3 {
        return s.to_string();
    }
    let head = (most - 1) / 2;
    let tail = most - 1 - head;
    c[..head].iter().chain(&['…']).chain(&c[c.len() - tail..]).collect()
}

/// What of a name may stand in a file's name.
pub fn file_name(s: &str) -> String {
    let safe = |c: char| if c.is_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let s: String = s.chars().map(safe).collect();
    s.trim_matches(['-', '.']).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_exact_where_they_can_be() {
        let n = [0.0, 1.0, 0.87654, 12.5, 123456.0, 0.002, 3.2e-6, -4.0].map(number);
        assert_eq!(n, ["0", "1", "0.8765", "12.5", "1.23e5", "0.002", "3.20e-6", "-4"]);
        assert_eq!([1500.0, 2e6, 12.0].map(short), ["1.5k", "2M", "12"]);
        assert_eq!(
            [0.5, 59.6, 3700.0, 90061.0].map(duration),
            ["500 ms", "1 min 0 s", "1 h 1 min", "1 d 1 h"]
        );
        assert_eq!([12.0, 3456.0, 1.5e6].map(micros), ["12 µs", "3.46 ms", "1.5 s"]);
        assert_eq!([10.0, 2048.0, 5e6].map(bytes), ["10 B", "2.0 KiB", "4.8 MiB"]);
        assert_eq!((shorten("abcdefghij", 5), shorten("abc", 5)), ("ab…ij".into(), "abc".into()));
        assert_eq!(group(1234567), "1,234,567");
    }
}
