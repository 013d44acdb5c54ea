//! When two texts are the same value of a category: `35` and `35.0`, `1e3` and `1000`, `true` and `1`, a date and the
//! midnight that a timestamp makes of it. What a container makes of a column is then no matter.
//!
//! A column's *form* is told from its training values, all of them: one text that is no number leaves every text what it
//! is. So do numbers that are more than their value: zip codes with leading zeros, versions (`1.1` and `1.10`).

use serde::{Deserialize, Serialize};

/// What all training values of a categorical column are like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// Texts: each is what it is.
    #[default]
    Text,
    /// Numbers, or true and false: written without exponent, leading plus or trailing zeros; 1 and 0 for true and false.
    Number,
    /// Dates and times: `2024-05-31`, or `2024-05-31T12:00:00` where the time is not midnight.
    Date,
}

/// Finds the form of a column, value by value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormFinder {
    numbers: bool,
    booleans: bool,
    dates: bool,
    /// A number with a fraction that ends in 0.
    padded: bool,
    /// Least and greatest number of digits behind the point.
    scale: Option<[usize; 2]>,
    /// A value that its form writes otherwise.
    altered: bool,
}

impl Default for FormFinder {
    fn default() -> Self {
        FormFinder { numbers: true, booleans: true, dates: true, padded: false, scale: None, altered: false }
    }
}

impl FormFinder {
    /// Whether further values can change what is found.
    pub fn is_open(&self) -> bool {
        self.numbers || self.booleans || self.dates
    }

    /// Looks at a present value.
    #[inline]
    pub fn push(&mut self, value: &[u8]) {
        if self.is_open() {
            self.look(value);
        }
    }

    fn look(&mut self, value: &[u8]) {
        if self.numbers {
            match Decimal::parse(value) {
                None => self.numbers = false,
                Some(d) => {
                    let scale = self.scale.get_or_insert([d.fraction.len(); 2]);
                    *scale = [scale[0].min(d.fraction.len()), scale[1].max(d.fraction.len())];
                    let whole = d.fraction.iter().all(|&b| b == b'0');
                    self.padded |= !whole && d.fraction.ends_with(b"0");
                }
            }
        }
        self.booleans = self.booleans && boolean(value).is_some();
        let date = if self.dates { date(value) } else { None };
        self.dates = date.is_some();
        self.altered |= date.map_or(!is_plain(value), |d| d.as_bytes() != value);
    }

    /// The form; that of no value is text.
    pub fn form(&self) -> Form {
        // of a fixed number of digits are the decimals of a database; of several, with zeros at the end, are versions
        let plain = !self.padded || self.scale.is_some_and(|[low, high]| low == high);
        let any = self.scale.is_some();
        if (self.numbers && any && plain) || (self.booleans && !self.numbers) {
            Form::Number
        } else if self.dates && !self.numbers && !self.booleans {
            Form::Date
        } else {
            Form::Text
        }
    }

    /// The form of a column whose values were texts by type, not by the way a file is written: what they say stays.
    pub fn form_of_texts(&self) -> Form {
        if self.altered { Form::Text } else { self.form() }
    }
}

impl Form {
    /// A value as the vocabulary has it, where that is another text than its own.
    pub fn canonical(self, value: &[u8]) -> Option<String> {
        let text = match self {
            Form::Text => return None,
            Form::Number if is_plain(value) => return None,
            Form::Number => match (boolean(value), Decimal::parse(value)) {
                (Some(b), _) => Some(if b { "1".into() } else { "0".into() }),
                (_, decimal) => decimal.and_then(|d| d.plain()),
            },
            Form::Date => date(value),
        };
        text.filter(|t| t.as_bytes() != value)
    }
}

/// `true` and `false` as programs write them.
pub(crate) fn boolean(value: &[u8]) -> Option<bool> {
    match value {
        b"true" | b"True" | b"TRUE" => Some(true),
        b"false" | b"False" | b"FALSE" => Some(false),
        _ => None,
    }
}

/// Whether a number is in its plain form already, told fast: most are.
#[inline]
fn is_plain(value: &[u8]) -> bool {
    let digits = value.strip_prefix(b"-").unwrap_or(value);
    let whole = digits.iter().all(u8::is_ascii_digit) && (digits.first() != Some(&b'0') || digits.len() == 1);
    whole && !digits.is_empty() && value != b"-0"
}

/// A decimal number as it is written; one with leading zeros or a plus in front is none: they say more than the value.
#[derive(Clone, Copy, Debug)]
struct Decimal<'a> {
    negative: bool,
    whole: &'a [u8],
    fraction: &'a [u8],
    exponent: i32,
}

/// Digits of a plain number at most; f64's largest has 309.
const MOST_DIGITS: i32 = 400;

impl<'a> Decimal<'a> {
    fn parse(text: &'a [u8]) -> Option<Decimal<'a>> {
        let (negative, rest) = match text {
            [b'-', rest @ ..] => (true, rest),
            _ => (false, text),
        };
        let digits = |t: &[u8]| t.iter().take_while(|b| b.is_ascii_digit()).count();
        let (whole, rest) = rest.split_at(digits(rest));
        if whole.is_empty() || (whole[0] == b'0' && whole.len() > 1) {
            return None;
        }
        let (fraction, rest) = match rest {
            [b'.', rest @ ..] => rest.split_at(digits(rest)),
            _ => (&b""[..], rest),
        };
        if fraction.is_empty() && text.contains(&b'.') {
            return None;
        }
        let exponent = match rest {
            [] => 0,
            [b'e' | b'E', power @ ..] => {
                let size = power.strip_prefix(b"-").or(power.strip_prefix(b"+")).unwrap_or(power);
                if size.is_empty() || size.len() > 3 || digits(size) < size.len() {
                    return None;
                }
                std::str::from_utf8(power.strip_prefix(b"+").unwrap_or(power)).ok()?.parse().ok()?
            }
            _ => return None,
        };
        let size = whole.len() + fraction.len();
        (size <= MOST_DIGITS as usize).then_some(Decimal { negative, whole, fraction, exponent })
    }

    /// Without exponent and needless zeros; `None` where that would be very long.
    fn plain(&self) -> Option<String> {
        let digits = [self.whole, self.fraction].concat();
        let leading = digits.iter().take_while(|&&b| b == b'0').count();
        let trailing = digits.iter().rev().take_while(|&&b| b == b'0').count();
        if leading == digits.len() {
            return Some("0".into());
        }
        let kept = std::str::from_utf8(&digits[leading..digits.len() - trailing]).ok()?;
        // where the point is, counted from the first digit that is kept
        let point = self.whole.len() as i32 - leading as i32 + self.exponent;
        let count = kept.len() as i32;
        if point.abs() > MOST_DIGITS || count - point > MOST_DIGITS {
            return None;
        }
        let zeros = |n: i32| "0".repeat(n.max(0) as usize);
        let number = if point <= 0 {
            format!("0.{}{kept}", zeros(-point))
        } else if point >= count {
            format!("{kept}{}", zeros(point - count))
        } else {
            format!("{}.{}", &kept[..point as usize], &kept[point as usize..])
        };
        Some(if self.negative { format!("-{number}") } else { number })
    }
}

/// A date as [`Form::Date`] has it: year to day, then perhaps a time of day, of UTC or no zone.
fn date(text: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(text).ok()?;
    let (day, rest) = (text.get(..10)?, text.get(10..)?);
    let shape = |t: &str, form: &str| {
        t.len() == form.len()
            && t.bytes().zip(form.bytes()).all(|(b, f)| if f == b'0' { b.is_ascii_digit() } else { b == f })
    };
    if !shape(day, "0000-00-00") {
        return None;
    }
    if rest.is_empty() {
        return Some(day.into());
    }
    let time = rest.strip_prefix(['T', ' '])?;
    let time = time.strip_suffix('Z').or(time.strip_suffix("+00:00")).unwrap_or(time);
    let (clock, fraction) = time.split_once('.').unwrap_or((time, ""));
    let clock = match clock.len() {
        5 if shape(clock, "00:00") => format!("{clock}:00"),
        _ if shape(clock, "00:00:00") => clock.to_string(),
        _ => return None,
    };
    if !fraction.bytes().all(|b| b.is_ascii_digit()) || fraction.len() > 9 {
        return None;
    }
    let fraction = fraction.trim_end_matches('0');
    Some(match (clock.as_str(), fraction) {
        ("00:00:00", "") => day.into(),
        (_, "") => format!("{day}T{clock}"),
        _ => format!("{day}T{clock}.{fraction}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn form(values: &[&str]) -> Form {
        let mut f = FormFinder::default();
        values.iter().for_each(|v| f.push(v.as_bytes()));
        f.form()
    }

    fn canonical(form: Form, value: &str) -> String {
        form.canonical(value.as_bytes()).unwrap_or(value.into())
    }

    #[test]
    fn forms_are_those_of_all_values() {
        assert_eq!(form(&["35", "36.0", "-1e3"]), Form::Number);
        assert_eq!(form(&["0.5", "2.0", "1e-05"]), Form::Number);
        assert_eq!(form(&["12.50", "2.00"]), Form::Number, "decimals of a database");
        assert_eq!(form(&["True", "False"]), Form::Number);
        assert_eq!(form(&["2024-05-31", "2024-05-31 12:00:00"]), Form::Date);
        for text in [
            &["35", "unknown"][..],
            &["007", "8"],
            &["+49", "8"],
            &["1.1", "1.10", "2.0"],
            &["2024-05-31", "35"],
            &["true", "35"],
            &["31.05.2024"],
            &["68fd1e64", "1e3"],
            &[],
        ] {
            assert_eq!(form(text), Form::Text, "{text:?}");
        }
    }

    #[test]
    fn one_value_is_one_text() {
        for (value, want) in [
            ("35", "35"),
            ("35.0", "35"),
            ("35.00", "35"),
            ("1e3", "1000"),
            ("1.5E+2", "150"),
            ("1.25e1", "12.5"),
            ("12.50", "12.5"),
            ("1e-05", "0.00001"),
            ("-0.0", "0"),
            ("-0", "0"),
            ("-35.0", "-35"),
            ("0.10", "0.1"),
            ("18446744073709551615", "18446744073709551615"),
            ("9007199254740993.0", "9007199254740993"),
            ("1e+23", "100000000000000000000000"),
            ("True", "1"),
            ("false", "0"),
            // no numbers
            ("007", "007"),
            ("35.", "35."),
            (".5", ".5"),
            ("1e", "1e"),
            ("u1", "u1"),
            ("1e999", "1e999"),
        ] {
            assert_eq!(canonical(Form::Number, value), want, "{value}");
            assert_eq!(canonical(Form::Text, value), value);
        }
        for (value, want) in [
            ("2024-05-31", "2024-05-31"),
            ("2024-05-31T00:00:00", "2024-05-31"),
            ("2024-05-31 00:00:00+00:00", "2024-05-31"),
            ("2024-05-31 12:30", "2024-05-31T12:30:00"),
            ("2024-05-31 12:30:00.500", "2024-05-31T12:30:00.5"),
            ("2024-05-31T12:30:00Z", "2024-05-31T12:30:00"),
            ("2024-05-31T12:30:00+02:00", "2024-05-31T12:30:00+02:00"),
            ("today", "today"),
        ] {
            assert_eq!(canonical(Form::Date, value), want, "{value}");
        }
    }

    proptest! {
        /// Whatever a program makes of a float is the same text, and a canonical text stays.
        #[test]
        fn floats_are_what_they_are(v in any::<f64>(), whole in any::<i64>()) {
            for v in [v, whole as f64] {
                if !v.is_finite() {
                    continue;
                }
                let want = canonical(Form::Number, &format!("{v}"));
                prop_assert_eq!(canonical(Form::Number, &format!("{v:e}")), want.clone());
                prop_assert_eq!(canonical(Form::Number, &format!("{v:?}")), want.clone());
                prop_assert_eq!(canonical(Form::Number, &want), want.clone());
                prop_assert_eq!(want.parse::<f64>().unwrap(), v);
            }
            prop_assert_eq!(canonical(Form::Number, &format!("{whole}.0")), whole.to_string());
        }

        #[test]
        fn nothing_panics(value in "[-+0-9.eETtrufalsZ: ]{0,24}|\\PC{0,12}") {
            for form in [Form::Text, Form::Number, Form::Date] {
                if let Some(text) = form.canonical(value.as_bytes()) {
                    prop_assert!(form.canonical(text.as_bytes()).is_none(), "{} then {}", value, text);
                }
            }
            let mut f = FormFinder::default();
            f.push(value.as_bytes());
            f.form();
        }
    }
}
