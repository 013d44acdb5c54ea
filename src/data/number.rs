//! Numbers, labels and missing values as fields of text have them.

use std::borrow::Cow;

use super::error::quoted;
use super::value::Form;

/// What a label without a rule says: 0 and 1, also written 1.0 or true, with or without blanks.
pub(crate) fn plain_label(field: &[u8]) -> Cow<'_, [u8]> {
    let field = field.trim_ascii();
    Form::Number.canonical(field).map_or(Cow::Borrowed(field), |text| text.into_bytes().into())
}

/// Texts by which programs mean that a value is missing.
pub(crate) const MISSING_TEXTS: [&str; 22] = [
    "NA", "NaN", "nan", "NAN", "-nan", "-NaN", "na", "N/A", "n/a", "#N/A", "<NA>", "NULL", "null", "Null",
    "None", "none", "nil", "\\N", "-", "--", "?", ".",
];

/// Whether a text is one of these.
pub(crate) fn means_missing(field: &[u8]) -> bool {
    MISSING_TEXTS.iter().any(|m| m.as_bytes() == field.trim_ascii())
}

/// What to do about a text in a column of numbers.
pub(crate) fn number_advice(field: &[u8]) -> String {
    match means_missing(field) {
        true => format!(
            "if it means that the value is missing: na = [{}] of the column, or data.na",
            quoted(field)
        ),
        false => "correct the value".into(),
    }
}

/// Whether a text is a number that is too large for 32 bits, or infinite.
pub(crate) fn beyond_range(field: &[u8]) -> bool {
    let value = std::str::from_utf8(field).ok().and_then(|t| t.trim().parse::<f64>().ok());
    value.is_some_and(|v| v.abs() > f64::from(f32::MAX))
}

/// A number with spaces round it; spaces alone are none.
#[cold]
pub(crate) fn spaced_number(field: &[u8]) -> Option<f64> {
    let inner = field.trim_ascii();
    if inner.is_empty() { None } else { parse_number(inner) }
}

/// A finite decimal number of float32's range; NaN for the empty field.
#[inline]
pub(crate) fn parse_number(field: &[u8]) -> Option<f64> {
    if field.is_empty() {
        return Some(f64::NAN);
    }
    let (negative, digits) = match field {
        [b'-', rest @ ..] => (true, rest),
        _ => (false, field),
    };
    // Up to 15 digits are exact in f64; this is nearly every field.
    if (1..=15).contains(&digits.len()) {
        let mut value = 0u64;
        let mut whole = true;
        for &d in digits {
            let digit = d.wrapping_sub(b'0');
            whole &= digit < 10;
            value = value.wrapping_mul(10).wrapping_add(u64::from(digit));
        }
        if whole {
            // at most 15 digits: as a signed number, which processors convert in one instruction
            let value = value as i64;
            return Some(if negative { -(value as f64) } else { value as f64 });
        }
    }
    // `f64::from_str` alone would let "inf" and "nan" through.
    if !field.iter().all(|b| b.is_ascii_digit() || b"+-.eE".contains(b)) {
        return None;
    }
    let value: f64 = std::str::from_utf8(field).ok()?.parse().ok()?;
    (value.abs() <= f64::from(f32::MAX)).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_exactly() {
        for (text, want) in [
            ("0", 0.0),
            ("-2", -2.0),
            ("007", 7.0),
            ("999999999999999", 999_999_999_999_999.0),
            ("12345678901234567890", 12_345_678_901_234_567_890.0),
            ("1.5", 1.5),
            ("-1e3", -1000.0),
            ("+4", 4.0),
        ] {
            assert_eq!(parse_number(text.as_bytes()), Some(want), "{text}");
        }
        assert!(parse_number(b"").unwrap().is_nan());
        for bad in ["4e38", "nan", "inf", "-", "1x", " 1", "0x10"] {
            assert_eq!(parse_number(bad.as_bytes()), None, "{bad}");
        }
        assert_eq!(spaced_number(b" 7 "), Some(7.0));
        assert_eq!(spaced_number(b"-2.5\t"), Some(-2.5));
        for bad in ["", " ", "1 2", "- 1", " x"] {
            assert_eq!(spaced_number(bad.as_bytes()), None, "{bad}");
        }
    }
}
