//! What a column is, guessed from its name and values.

use super::header::is_label;
use super::number::{MISSING_TEXTS, parse_number, spaced_number};
use super::survey::ColumnSurvey;

/// Names of labels.
const LABELS: [&str; 12] = [
    "label",
    "click",
    "clicked",
    "is_click",
    "target",
    "y",
    "conversion",
    "converted",
    "purchase",
    "outcome",
    "class",
    "like",
];

/// Whether a text is a name such as columns have: of a label or an id.
pub(super) fn is_telling(name: &str) -> bool {
    LABELS.iter().any(|l| l.eq_ignore_ascii_case(name)) || is_id(name)
}

/// The label's value that is likely to be the positive one: by its word, else the rarer one.
pub(super) fn positive_value(column: &ColumnSurvey) -> Option<String> {
    const POSITIVE: [&str; 9] = ["yes", "y", "true", "t", "click", "clicked", "positive", "converted", "buy"];
    let text = |i: usize| String::from_utf8_lossy(column.values.value(i)).trim().to_string();
    let known = |w: &&str| (0..column.values.len()).map(text).find(|v| v.eq_ignore_ascii_case(w));
    let rarest = || (0..column.values.len()).min_by_key(|&i| column.counts[i]).map(text);
    POSITIVE.iter().find_map(known).or_else(rarest)
}

/// The column that is most likely to be predicted: 0 and 1, by its name first.
pub(super) fn guess_label(columns: &[ColumnSurvey]) -> Option<String> {
    let binary = |c: &&ColumnSurvey| {
        c.missing == 0 && c.distinct == 2 && (0..c.values.len()).all(|i| is_label(c.values.value(i)))
    };
    let named = LABELS.iter().find_map(|n| columns.iter().find(|c| c.name.eq_ignore_ascii_case(n)));
    let first = columns.iter().find(binary);
    named.or(first).map(|c| c.name.clone())
}

impl ColumnSurvey {
    /// Kind and warnings, where the kind is not plain from the values its reason. `named`: the file names its columns.
    pub(super) fn guess(&mut self, named: bool) {
        self.find_missing_texts();
        let present = self.rows - self.missing;
        self.kind = if self.lists {
            "list"
        } else if self.is_index() {
            self.warnings.push(match self.numbered() {
                true => "the numbers of the rows, in order".into(),
                false => "pandas' index, which numbers rows".into(),
            });
            "ignore"
        } else if self.distinct <= 1 {
            self.warnings.push(match self.distinct {
                0 => "always missing".into(),
                _ => "the same value in every row".into(),
            });
            "ignore"
        } else if self.dates == present {
            self.warnings.push("dates; for --split-by time".into());
            "ignore"
        } else if self.numbers == present
            && self.whole < present
            && !(self.integral == present && is_id(&self.name))
        {
            "numeric"
        } else if self.integral == present {
            let (kind, reason) = self.guess_whole(named && !is_generic(&self.name));
            self.warnings.extend(reason);
            kind
        } else if self.commas > 0 && self.commas + self.numbers == present {
            self.warnings.push(
                "numbers with commas: write them with a decimal point and without commas between thousands, or, if each is a \
                 list, say kind = \"list\""
                    .into(),
            );
            "ignore"
        } else if self.separated * 4 > present && self.separator.is_some() {
            "list"
        } else if self.distinct as f64 > 0.9 * present as f64 && self.distinct > 100 {
            self.warnings.push("nearly every row has its own text: the id of a row, or free text?".into());
            "ignore"
        } else {
            if self.numbers * 2 > present {
                let number = |v: &[u8]| parse_number(v).is_some() || spaced_number(v).is_some();
                let odd = (0..self.values.len()).map(|i| self.values.value(i)).find(|v| !number(v));
                let odd = odd.map_or(String::new(), super::error::quoted);
                self.warnings.push(format!(
                    "mostly numbers, but also {odd}; if that means missing: data.na = [{odd}]"
                ));
            }
            "categorical"
        };
    }

    /// Finds the texts that mean "missing" in a column of numbers, or of dates: the usual ones, where they are the only
    /// others.
    fn find_missing_texts(&mut self) {
        let of_kind = self.numbers.max(self.dates);
        let known: Vec<(&str, u64)> = MISSING_TEXTS
            .iter()
            .filter_map(|t| Some((*t, u64::from(self.counts[self.values.get(t.as_bytes())? as usize]))))
            .collect();
        let odd: u64 = known.iter().map(|k| k.1).sum();
        if self.lists || odd == 0 || of_kind == 0 || of_kind + odd != self.rows - self.missing {
            return;
        }
        self.na = known.iter().map(|k| k.0.to_string()).collect();
        self.missing += odd;
        self.distinct -= known.len();
        let texts = self.na.join("\", \"");
        self.warnings.push(format!("\"{texts}\" taken as missing: there are but numbers and dates besides"));
        self.examples.retain(|e| !self.na.contains(e));
    }

    /// Whether the values number the rows: 0, 1, 2, … in order, perhaps anew in each file.
    fn numbered(&self) -> bool {
        self.missing == 0 && self.rows >= 10 && self.restarts.is_some_and(|n| n < self.files)
    }

    /// Whether the column numbers rows, by its values or by the name that pandas gives.
    fn is_index(&self) -> bool {
        let unnamed = self.name == "Unnamed: 0" || self.name == "__index_level_0__";
        self.numbered() || (unnamed && self.whole == self.rows && self.distinct as u64 == self.rows)
    }

    /// What a column of whole numbers is, and why.
    fn guess_whole(&self, named: bool) -> (&'static str, Option<String>) {
        let present = self.rows - self.missing;
        let [low, high] = self.range.unwrap_or([0.0, 0.0]);
        let [first, middle, third] = self.quartiles();
        let span = high - low;
        let repeats = present as f64 / self.distinct.max(1) as f64;
        let id = is_id(&self.name);
        let many = self.distinct > 100;
        let says_time = ["time", "date", "stamp"].iter().any(|w| self.name.to_ascii_lowercase().contains(w));
        // from 1985 to 2103, and without a name that says so no more than ten years of them
        let time = [1.0, 1e3]
            .iter()
            .any(|&unit| low >= 5e8 * unit && high <= 4.2e9 * unit && (says_time || span < 3.2e8 * unit));
        if time && !id && many && (says_time || (!named && repeats < 10.0)) {
            let why =
                "looks like times, counted from 1970; for --split-by time (ids? then kind = \"categorical\")";
            return ("ignore", Some(why.into()));
        }
        let codes = self.shortest == self.longest && self.longest >= 4;
        let huge = high.max(-low) > f64::from(1u32 << 31);
        if id || codes || huge {
            // few rows: the name has to say so
            let many = many || (id && self.distinct >= 20);
            let alone =
                self.distinct as u64 == present || (!id && self.distinct as f64 > 0.9 * present as f64);
            if alone && many {
                return ("ignore", Some("nearly every row has its own value: the id of a row?".into()));
            }
            let why = match (id, codes) {
                (true, _) => "as the name says".into(),
                (_, true) => format!("all have {} digits", self.longest),
                _ => "some are beyond 2^31".into(),
            };
            let rare =
                if repeats < 2.0 { "; many stand in one row only: mind min_count, or hash" } else { "" };
            return ("categorical", Some(format!("numbers that look like ids: {why}{rare}")));
        }
        // every number of a range once, in some order: what counts rows, not what is measured
        if self.distinct as u64 == present && many && self.distinct as f64 >= 0.9 * (span + 1.0) {
            let why = format!("every row has its own number of {low} to {high}: the id of a row?");
            return ("ignore", Some(why));
        }
        if self.distinct <= 20 && low >= 0.0 {
            let why = "few different whole numbers: taken as categories";
            return ("categorical", (self.distinct > 2).then(|| why.into()));
        }
        // Ids are spread over their range and come again and again; amounts crowd at its lower end.
        let spread =
            low >= 0.0 && repeats >= 2.0 && third - first >= 0.12 * span && middle >= low + 0.05 * span;
        let full = self.distinct as f64 >= 0.5 * (span + 1.0);
        if !named && spread && (full || span >= 1000.0) {
            let how = if full { "that fill" } else { "spread over" };
            return (
                "categorical",
                Some(format!(
                    "no name, and {} whole numbers {how} {low} to {high}, each in about {repeats:.0} rows: taken as ids; \
                     amounts are kind = \"numeric\"",
                    self.distinct
                )),
            );
        }
        ("numeric", None)
    }

    /// Numbers below which a quarter, half and three quarters of the rows are; of the distinct values that were kept.
    fn quartiles(&self) -> [f64; 3] {
        self.quantiles([0.25, 0.5, 0.75])
    }

    /// Whether large values are rare and far from the rest, as of counts and amounts: the logarithm brings them near.
    pub(super) fn skewed(&self) -> bool {
        let [low, middle, high] = self.quantiles([0.01, 0.5, 0.99]);
        let least = self.range.map_or(0.0, |r| r[0]);
        least >= 0.0 && high > 2.0 && high - middle > 3.0 * (middle - low)
    }

    /// Numbers below which such shares of the rows are; of the distinct values that were kept.
    fn quantiles<const N: usize>(&self, shares: [f64; N]) -> [f64; N] {
        let number = |v: &[u8]| parse_number(v).or_else(|| spaced_number(v));
        let value = |(i, &n): (usize, &u32)| Some((number(self.values.value(i))?, u64::from(n)));
        let mut values: Vec<(f64, u64)> = self.counts.iter().enumerate().filter_map(value).collect();
        values.sort_by(|a, b| a.0.total_cmp(&b.0));
        let all: u64 = values.iter().map(|v| v.1).sum();
        shares.map(|share| {
            let mut before = 0;
            let at = values.iter().find(|v| {
                before += v.1;
                before as f64 >= share * all as f64
            });
            at.map_or(0.0, |v| v.0)
        })
    }
}

/// Whether a column's name says that it holds ids: `id`, `user_id`, `movieId`, `zip`, `area_code`; or what has one.
fn is_id(name: &str) -> bool {
    const THINGS: [&str; 16] = [
        "user",
        "item",
        "movie",
        "product",
        "ad",
        "advertiser",
        "campaign",
        "creative",
        "publisher",
        "site",
        "app",
        "device",
        "session",
        "brand",
        "category",
        "query",
    ];
    const WORDS: [&str; 12] = [
        "bid", "paid", "unpaid", "prepaid", "valid", "invalid", "grid", "avoid", "void", "rapid", "solid",
        "covid",
    ];
    let name = name.to_ascii_lowercase();
    let last = name.rsplit(|c: char| !c.is_alphanumeric()).next().unwrap_or("");
    (last.ends_with("id") && !WORDS.contains(&last))
        || THINGS.contains(&&name[..])
        || name.ends_with("_code")
        || name.contains("zip")
}

/// Whether a name says nothing: `c3`, `feature_12`, `Unnamed: 0`.
fn is_generic(name: &str) -> bool {
    const WORDS: [&str; 11] =
        ["", "c", "f", "v", "x", "col", "column", "field", "feature", "feat", "unnamed"];
    let name = name.to_ascii_lowercase();
    let word = name.trim_end_matches(|c: char| c.is_ascii_digit() || "_:-. ".contains(c));
    WORDS.contains(&word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::format::FormatOptions;
    use crate::data::input::Place;
    use crate::data::reader::{ReadOptions, Source};
    use crate::data::survey::{Survey, survey};

    fn of(text: &str) -> Survey {
        let place = Place::Bytes("x.csv".into(), text.as_bytes().into());
        let source = Source::new(vec![place], FormatOptions::default(), ReadOptions::default());
        survey(&source, 0, None).unwrap()
    }

    /// Columns of whole numbers in a file without a header: ids by what they are like, amounts, times, and row numbers.
    #[test]
    fn whole_numbers_without_names() {
        let mut state = 1u64;
        let mut draw = |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        let mut text = String::new();
        for i in 0..4000u64 {
            // a user, an item of a sparse range, a count that is mostly small, a time, the number of the row, stars
            let count = [0, 1, 2, 3, draw(40), draw(3000)][draw(6) as usize];
            let item = 317 * draw(250);
            let time = 1_500_000_000 + draw(10_000_000);
            text += &format!("{},{item},{count},{time},{},{}\n", 1 + i * 7 % 500, 70_000 + i, draw(5));
        }
        let s = of(&text);
        let kinds: Vec<&str> = s.columns.iter().map(|c| c.kind).collect();
        assert_eq!(kinds, ["categorical", "categorical", "numeric", "ignore", "ignore", "categorical"]);
        let toml = s.to_toml("x.csv");
        for part in [
            "# note: no name, and 500 whole numbers that fill 1 to 500, each in about 8 rows: taken as ids",
            "whole numbers spread over 0 to ",
            "# note: looks like times",
            "# note: the numbers of the rows, in order",
            "# note: few different whole numbers: taken as categories",
        ] {
            assert!(toml.contains(part), "{part} in {toml}");
        }
        // a name settles it
        let named = of(&format!("visits,amount,count,at,bid,stars\n{text}"));
        let kinds: Vec<&str> = named.columns.iter().map(|c| c.kind).collect();
        assert_eq!(kinds[..3], ["numeric"; 3]);
        let ids = of(&format!("user_id,itemId,paid,event_time,id,stars\n{text}"));
        let kinds: Vec<&str> = ids.columns.iter().map(|c| c.kind).collect();
        assert_eq!(kinds, ["categorical", "categorical", "numeric", "ignore", "ignore", "categorical"]);
    }

    #[test]
    fn names_say_what_they_say() {
        assert!(
            ["id", "user_id", "movieId", "USERID", "gid", "zip", "area_code", "user", "Item"]
                .iter()
                .all(|n| is_id(n))
        );
        assert!(
            !["bid", "max_bid", "paid", "is_valid", "idle", "items", "user_age", "c1", "price"]
                .iter()
                .any(|n| is_id(n))
        );
        assert!(["c1", "C26", "feature_12", "Unnamed: 0", "7"].iter().all(|n| is_generic(n)));
        assert!(!["count1", "age", "I3"].iter().any(|n| is_generic(n)));
    }
}
