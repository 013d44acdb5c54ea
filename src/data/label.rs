//! What makes a row positive: `positive = ">= 4"`.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::value::Form;

/// How a value is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compare {
    Less,
    AtMost,
    More,
    AtLeast,
    Equal,
    Other,
}

/// The spellings, longer ones first.
const SPELLINGS: [(&str, Compare); 7] = [
    (">=", Compare::AtLeast),
    ("<=", Compare::AtMost),
    ("==", Compare::Equal),
    ("!=", Compare::Other),
    (">", Compare::More),
    ("<", Compare::Less),
    ("=", Compare::Equal),
];

/// Which label values are positive: a comparison with a number (`>= 4`), or with texts (`= yes`, `= yes, true`).
#[derive(Clone, Debug, PartialEq)]
pub struct LabelRule {
    text: String,
    compare: Compare,
    number: Option<f64>,
    words: Vec<String>,
}

// the number of a rule is never NaN
impl Eq for LabelRule {}

impl LabelRule {
    /// Reads a rule; the error says what one looks like.
    pub fn parse(text: &str) -> Result<LabelRule, String> {
        let help = "expected a comparison, such as \">= 4\", \"= yes\" or \"= click, buy\"";
        let t = text.trim();
        let Some((rest, compare)) = SPELLINGS.iter().find_map(|(s, c)| Some((t.strip_prefix(s)?.trim(), *c)))
        else {
            return Err(format!("{text:?} has no comparison; {help}"));
        };
        if rest.is_empty() {
            return Err(format!("{text:?} compares with nothing; {help}"));
        }
        let number = rest.parse::<f64>().ok().filter(|v| v.is_finite());
        let words: Vec<String> = rest.split(',').map(|w| w.trim().to_string()).collect();
        if number.is_none() && !matches!(compare, Compare::Equal | Compare::Other) {
            return Err(format!("{text:?} compares the order of a text; {help}"));
        }
        Ok(LabelRule { text: t.to_string(), compare, number, words })
    }

    /// Whether it compares with a number.
    pub fn is_numeric(&self) -> bool {
        self.number.is_some()
    }

    /// Whether a label's text is positive; `None` where a number is compared with something else. Blanks around the text
    /// are no part of it, true is 1, and 1.0 is.
    pub fn of(&self, value: &[u8]) -> Option<bool> {
        let text = std::str::from_utf8(value).ok()?.trim();
        let plain = |text: &str| Form::Number.canonical(text.as_bytes()).unwrap_or_else(|| text.to_string());
        if let Some(number) = self.number {
            let value = text.parse().or_else(|_| plain(text).parse());
            return self.of_number(value.ok().filter(|v: &f64| !v.is_nan())?, number);
        }
        let found = self.words.iter().any(|w| w == text || plain(w) == plain(text));
        Some(found == (self.compare == Compare::Equal))
    }

    fn of_number(&self, value: f64, number: f64) -> Option<bool> {
        Some(match self.compare {
            Compare::Less => value < number,
            Compare::AtMost => value <= number,
            Compare::More => value > number,
            Compare::AtLeast => value >= number,
            Compare::Equal => value == number,
            Compare::Other => value != number,
        })
    }

    /// As it was written.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl Serialize for LabelRule {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for LabelRule {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<LabelRule, D::Error> {
        LabelRule::parse(&String::deserialize(d)?).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_follow_their_text() {
        let rule = |t: &str| LabelRule::parse(t).unwrap();
        let of = |t: &str, v: &str| rule(t).of(v.as_bytes());
        assert_eq!(
            (of(">= 4", "4"), of(">=4", "3.5"), of("> 4", "4.0")),
            (Some(true), Some(false), Some(false))
        );
        assert_eq!(
            (of("= 1", "1.0"), of("!= 0", "2"), of("< 0", "-1")),
            (Some(true), Some(true), Some(true))
        );
        assert_eq!((of("<= 2", "2"), of(">= 4", "high")), (Some(true), None));
        assert_eq!((of("= yes", "yes"), of("= yes", "Yes")), (Some(true), Some(false)));
        assert_eq!((of("= click, buy", "buy"), of("!= view", "buy")), (Some(true), Some(true)));
        assert_eq!(of("!= view", "view"), Some(false));
        assert_eq!((of("= >50K", " >50K"), of("= >50K", "<=50K")), (Some(true), Some(false)));
        assert_eq!([of("= true", "1"), of("= 1", "True"), of("= 1, 2", "2.0")], [Some(true); 3]);
        for bad in ["4", "", ">=", ">= high", "yes"] {
            let e = LabelRule::parse(bad).unwrap_err();
            assert!(e.contains("expected a comparison"), "{e}");
        }
    }
}
