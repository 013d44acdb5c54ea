//! Whether a text file's first record has the columns' names: told from evidence, once, and said.

use std::collections::{HashMap, HashSet};

use super::delimited::Record;
use super::error::quoted;
use super::format::Delimited;
use super::number::{means_missing, parse_number, spaced_number};
use super::plan::{listed, missing_columns};
use super::schema::Schema;
use super::value::{Form, boolean};

/// A chance below which values are not of the rows that follow.
const UNLIKELY: f64 = 0.05;

/// What a first record is, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum First {
    /// Names.
    Header(&'static str),
    /// A row.
    Row(&'static str),
    /// Either.
    Unclear,
}

fn number(value: &[u8]) -> bool {
    !value.is_empty() && (parse_number(value).is_some() || spaced_number(value).is_some())
}

/// The names in a header: without blanks around them, and those of pandas for columns without one. A name that the
/// schema has with its blanks keeps them.
pub(crate) fn names_of(first: &[Vec<u8>], schema: Option<&Schema>) -> Vec<String> {
    let known: HashSet<&str> = schema.map(|s| s.needed().into_iter().collect()).unwrap_or_default();
    let name = |(i, v): (usize, &Vec<u8>)| {
        let whole = String::from_utf8_lossy(v);
        match whole.trim() {
            _ if known.contains(whole.as_ref()) => whole.into_owned(),
            "" => format!("Unnamed: {i}"),
            name => name.to_string(),
        }
    };
    first.iter().enumerate().map(name).collect()
}

/// Tells names from a row by the records that follow, where nothing is known of the columns.
pub(crate) fn first_record(first: &[Vec<u8>], rest: &[&[Vec<u8>]]) -> First {
    let column = |j: usize| rest.iter().filter_map(move |r| r.get(j)).filter(|v| !v.is_empty());
    // pandas leaves the name of its index empty
    let named = if first.first().is_some_and(Vec::is_empty) { &first[1..] } else { first };
    let mut seen = HashSet::new();
    let counted = first.len() > 2 && first.iter().enumerate().all(|(i, v)| *v == i.to_string().as_bytes());
    if counted {
        let other =
            |j: usize| column(j).next().is_some() && column(j).all(|v| !v.iter().all(u8::is_ascii_digit));
        if (0..first.len()).any(other) {
            return First::Header("its names are 0, 1, 2, …, over columns of something else");
        }
    }
    // numbers may be names as well, of years say; but a text over numbers is a name
    let over_numbers = |j: usize| {
        let name = &first[j];
        let text = !name.is_empty() && !number(name) && !means_missing(name);
        text && column(j).next().is_some() && column(j).all(|v| number(v))
    };
    let index = first.len() > 2 && named.len() < first.len();
    if index && named.iter().enumerate().all(|(i, v)| *v == i.to_string().as_bytes()) {
        return First::Header("its names are 0, 1, 2, … behind pandas' index");
    }
    if (0..first.len()).any(over_numbers) && named.iter().all(|v| !v.trim_ascii().is_empty()) {
        return First::Header("a column of numbers has a name");
    }
    if named.is_empty() || named.iter().any(|v| v.trim_ascii().is_empty()) {
        return First::Row("a column would have no name");
    }
    if named.iter().any(|v| number(v)) {
        return First::Row("it has numbers");
    }
    if named.iter().any(|v| !seen.insert(v.trim_ascii())) {
        return First::Row("a value stands twice");
    }
    if named.len() < first.len() {
        return First::Header("only the first column has no name: pandas' index");
    }
    let dates =
        |j: usize| column(j).next().is_some() && column(j).all(|v| super::split::time_of(v).is_some());
    if (0..first.len()).any(|j| dates(j) && super::split::time_of(&first[j]).is_none()) {
        return First::Header("a column of dates has a name");
    }
    match stranger(first, &(0..first.len()).collect::<Vec<_>>(), rest) {
        Some(true) => First::Header("its values never come again below"),
        Some(false) => First::Row("its values come again below"),
        None if names_say_so(first) => First::Header("its values are such names as columns have"),
        None => First::Unclear,
    }
}

/// Whether values of some columns are of another kind than those that follow: in a column whose values repeat, one that
/// never comes again is unlikely (Good and Turing: as likely as the share of values that occur once). `None` where
/// that says nothing.
fn stranger(first: &[Vec<u8>], columns: &[usize], rest: &[&[Vec<u8>]]) -> Option<bool> {
    match chance_of(first, columns, rest) {
        None => Some(false),
        Some(chance) => (chance <= UNLIKELY).then_some(true),
    }
}

/// How likely it is that none of a row's values in some columns comes again; `None` where one does.
fn chance_of(first: &[Vec<u8>], columns: &[usize], rest: &[&[Vec<u8>]]) -> Option<f64> {
    let mut chance = 1.0;
    for &j in columns {
        let mut counts: HashMap<&[u8], u32> = HashMap::new();
        rest.iter().filter_map(|r| r.get(j)).for_each(|v| *counts.entry(v).or_default() += 1);
        let all: u32 = counts.values().sum();
        if all == 0 || first.get(j).is_none_or(Vec::is_empty) {
            continue;
        }
        if counts.contains_key(&first[j][..]) {
            return None;
        }
        let once = counts.values().filter(|&&n| n == 1).count();
        chance *= (once as f64 + 0.5) / (f64::from(all) + 1.0);
    }
    Some(chance)
}

/// Whether texts look like names, and one is such as a label or an id has.
fn names_say_so(first: &[Vec<u8>]) -> bool {
    let word = |v: &Vec<u8>| {
        let text = String::from_utf8_lossy(v);
        let text = text.trim();
        text.chars().count() <= 40
            && text.chars().next().is_some_and(|c| c.is_alphabetic() || c == '_')
            && text.chars().all(|c| c.is_alphanumeric() || " _.-#%()/".contains(c))
    };
    let telling = |v: &Vec<u8>| super::guess::is_telling(String::from_utf8_lossy(v).trim());
    first.iter().all(word) && first.iter().any(telling)
}

/// The names in the first record, if it is a header; `None` if the file has none and the schema knows its columns.
/// `labelled`: rows must have labels; `decided`: what the first of several files showed. The error is a line and what is
/// wrong.
pub(crate) fn read_header(
    schema: &Schema,
    format: &Delimited,
    records: &[Record],
    labelled: bool,
    decided: Option<bool>,
) -> Result<Option<Vec<String>>, (u64, String)> {
    let Some(first) = records.first() else { return Ok(None) };
    let names = names_of(&first.values, Some(schema));
    let mut needed = schema.needed();
    if labelled && !needed.contains(&&schema.label.name[..]) {
        needed.push(&schema.label.name);
    }
    let there: HashSet<&str> = names.iter().map(String::as_str).collect();
    let known = needed.iter().filter(|n| there.contains(**n)).count();
    let shown = quoted(&first.values.join(&format.delimiter));
    let missing = || (first.line, missing_columns(&names, &needed).unwrap_or_default());
    // beside a file with a header one without is read where its first row is a row beyond doubt
    let row = || {
        known == 0
            && first.values.len() == schema.file.len()
            && matches!(row_of(schema, records), First::Row(_))
    };
    let header = match (format.header, decided) {
        (None, Some(true)) if row() => Some(false),
        (said, decided) => said.or(decided),
    };
    match header {
        Some(true) if known == 0 && !needed.is_empty() => {
            let like: Vec<String> = needed.iter().take(3).map(|n| n.to_string()).collect();
            Err((
                first.line,
                format!(
                    "its first row is {shown}, expected a header with the names of columns such as {}; correct the names, or say \
                     that the file has none: --header no (or --set data.header=no)",
                    listed(&like)
                ),
            ))
        }
        Some(true) if known < needed.len() => Err(missing()),
        Some(true) => Ok(Some(names)),
        Some(false) if known * 2 > needed.len() => Err((
            first.line,
            format!(
                "its first row {shown} has the columns' names, but the files are said to have no header; say that this one has: \
                 --header yes (or --set data.header=yes)"
            ),
        )),
        Some(false) => match surely_names(schema, records) {
            Some(why) => Err((
                first.line,
                format!(
                    "its first row {shown} looks like a header ({why}), but the files are said to have none; take that row out, or \
                     name the columns as the schema does and say --header yes (or --set data.header=yes)"
                ),
            )),
            None => without(schema, first, &shown).map(|()| None),
        },
        None if known > 0 && known == needed.len() => Ok(Some(names)),
        None => match row_of(schema, records) {
            _ if known == 0 && schema.file.is_empty() => without(schema, first, &shown).map(|()| None),
            First::Header(_) if known > 0 => Err(missing()),
            First::Unclear if known > 0 => Err(missing()),
            First::Header(why) => Err((
                first.line,
                format!(
                    "its first row {shown} looks like a header ({why}), but {}; correct the names, or say that it is a row: \
                     --header no (or --set data.header=no)",
                    missing().1
                ),
            )),
            First::Row(_) => without(schema, first, &shown).map(|()| None),
            First::Unclear => {
                without(schema, first, &shown)?;
                let have = first.values.len();
                if have != schema.file.len() && have + 1 != schema.file.len() {
                    // no names, no row: looked at one by one
                    return Ok(None);
                }
                Err((
                    first.line,
                    format!(
                        "it cannot be told whether its first row {shown} is a header; say so: --header yes or --header no (or --set data.header=…)"
                    ),
                ))
            }
        },
    }
}

/// Whether the first row of a file that is said to have no header is one beyond doubt: no number where there are but
/// numbers below, or texts that never come again.
fn surely_names(schema: &Schema, records: &[Record]) -> Option<&'static str> {
    let (first, rest) = (&records[0].values, &records[1..]);
    let rest: Vec<&[Vec<u8>]> = rest.iter().map(|r| &r.values[..]).collect();
    if first.iter().any(|v| v.is_empty() || number(v) || means_missing(v)) || rest.len() < 3 {
        return None;
    }
    let column = |j: usize| rest.iter().filter_map(move |r| r.get(j)).filter(|v| !v.is_empty());
    let numbers = (0..first.len()).filter(|&j| column(j).next().is_some() && column(j).all(|v| number(v)));
    match numbers.count() {
        0 => {
            let all: Vec<usize> = (0..first.len()).collect();
            let rule = schema.label.positive.as_ref().is_none_or(|r| !r.is_numeric());
            (rule && chance_of(first, &all, &rest).is_some_and(|c| c < 1e-4))
                .then_some("its values never come again below")
        }
        1 if first.len() > 1 => None,
        _ => Some("texts over numbers"),
    }
}

/// Tells names from a row where the columns are known by their order.
fn row_of(schema: &Schema, records: &[Record]) -> First {
    let (first, rest) = (&records[0].values, &records[1..]);
    let rest: Vec<&[Vec<u8>]> = rest.iter().map(|r| &r.values[..]).collect();
    let count = schema.file.len();
    if count == 0 {
        return First::Header("");
    }
    if first.len() != count && first.len() + 1 != count {
        return First::Unclear;
    }
    // a file to be scored may lack the label
    let label = schema.file.iter().position(|n| *n == schema.label.name);
    let shift = |i: usize| match label {
        Some(l) if first.len() < count => (i != l).then(|| i - usize::from(i > l)),
        _ => Some(i),
    };
    let place = |name: &str| schema.file.iter().position(|n| n == name).and_then(shift);
    let value = |j: usize| first.get(j).map_or(&b""[..], |v| v.trim_ascii());
    let all = |j: usize, test: &dyn Fn(&[u8]) -> bool| {
        let mut present =
            rest.iter().filter_map(|r| r.get(j)).filter(|v| !v.trim_ascii().is_empty()).peekable();
        present.peek().is_some() && present.all(|v| test(v))
    };
    let numeric = schema.numeric.iter().filter_map(|c| place(c.from.as_deref().unwrap_or(&c.name)));
    let weight = schema.weight.as_deref().and_then(place);
    let mut numbers = false;
    for j in numeric.chain(weight) {
        if number(value(j)) {
            numbers = true;
        } else if !value(j).is_empty() && all(j, &number) {
            return First::Header("a column of numbers begins with a text");
        }
    }
    let valid = |v: &[u8]| match &schema.label.positive {
        Some(rule) if rule.is_numeric() => rule.of(v).is_some(),
        Some(_) => true,
        None => is_label(v),
    };
    if let Some(j) = label.and_then(shift)
        && !value(j).is_empty()
        && schema.label.positive.as_ref().is_none_or(|r| r.is_numeric())
    {
        match valid(value(j)) {
            true => numbers = true,
            false if all(j, &valid) => return First::Header("the labels begin with a text"),
            false => {}
        }
    }
    if numbers {
        return First::Row("it has numbers where these are expected");
    }
    let others = (0..first.len()).collect::<Vec<_>>();
    match stranger(first, &others, &rest) {
        Some(true) => First::Header("its values never come again below"),
        Some(false) => First::Row("its values come again below"),
        None => First::Unclear,
    }
}

/// Whether a text is a label without a rule: 0 or 1 in some form.
pub(crate) fn is_label(value: &[u8]) -> bool {
    let plain = Form::Number.canonical(value);
    boolean(value).is_some()
        || matches!(plain.as_ref().map_or(value, |p| p.as_bytes()), b"0" | b"1" | b"-1" | b"+1")
}

/// Whether a file without a header can be read by a schema.
fn without(schema: &Schema, first: &Record, shown: &str) -> Result<(), (u64, String)> {
    let have = first.values.len();
    let count = schema.file.len();
    if count == 0 {
        return Err((
            first.line,
            format!(
                "has no header with the schema's columns, and the schema does not say their order; its first row is {shown}; \
                 make a schema from a file with a header, or list all columns in the order of the file"
            ),
        ));
    }
    // one less: a file to be scored may lack the label; other rows are looked at one by one
    if have != count && have + 1 != count && have < 2 {
        return Err((
            first.line,
            format!(
                "{have} field in the first row, {shown}, expected {count} ({}); check data.delimiter and data.header",
                listed(&schema.file)
            ),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(lines: &str) -> First {
        let records: Vec<Vec<Vec<u8>>> = lines
            .split_terminator('\n')
            .map(|l| l.split(',').map(|v| v.as_bytes().to_vec()).collect())
            .collect();
        let rest: Vec<&[Vec<u8>]> = records[1..].iter().map(|r| &r[..]).collect();
        first_record(&records[0], &rest)
    }

    fn names(lines: &str) -> bool {
        matches!(told(lines), First::Header(_))
    }

    #[test]
    fn headers_that_people_have() {
        let body: String = (0..60).map(|i| format!("{i},{},u{},{}.5\n", i % 2, i % 7, i)).collect();
        for header in [
            ",click,user,x\n",
            "Unnamed: 0,click,user,x\n",
            "id, click ,user,x\n",
            "a,b,b,x\n",
            "id,2019,2020,x\n",
        ] {
            assert!(names(&format!("{header}{body}")), "{header}");
        }
        assert_eq!(told(&body), First::Row("it has numbers"));
        assert!(matches!(told("NA,1,u1\n2,0,u1\n3,1,u2\n"), First::Row(_)), "a missing number is no name");
        assert!(names(&format!("0,1,2,3\n{body}")), "names that are counted");
        let text: String =
            (0..60).map(|i| format!("{},u{},c{}\n", ["no", "yes"][i % 2], i % 7, i % 3)).collect();
        assert!(names(&format!("clicked,user,city\n{text}")) && names(&format!("antwort,wer,wo\n{text}")));
        assert!(matches!(told(&text), First::Row(_)));
        // few rows: names that say so, or nobody knows
        assert!(names("label,who\nyes,u1\nno,u2\n"));
        assert_eq!(told("rot,ada\nblau,bob\n"), First::Unclear);
        assert!(names("tag,wann\nx,2024-05-31\ny,2024-06-01\n"));
    }
}
