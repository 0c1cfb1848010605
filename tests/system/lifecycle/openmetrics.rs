//! A strict parser of the part of the OpenMetrics text format that cleat uses. It panics on any other
//! input. The rules are those of the specification 1.0, sections "ABNF" and "Metric types".

use std::collections::{BTreeMap, BTreeSet};

/// The labels of a sample, ordered by name.
pub(crate) type Labels = BTreeMap<String, String>;

/// Parsed metrics.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    samples: BTreeMap<(String, Labels), f64>,
    pub(crate) families: BTreeMap<String, String>,
}

impl Metrics {
    /// Parses `text`, or panics.
    pub(crate) fn read(text: &str) -> Self {
        let body = text.strip_suffix("# EOF\n").expect("the text ends with EOF");
        let mut metrics = Self::default();
        let mut lines = body.lines().peekable();
        while let Some(line) = lines.next() {
            let help = line.strip_prefix("# HELP ").unwrap_or_else(|| panic!("HELP: {line}"));
            let (family, help) = help.split_once(' ').expect("a name and a text");
            assert!(!help.trim().is_empty() && !help.contains('\\'), "{line}");
            let kind = lines.next().and_then(|line| line.strip_prefix("# TYPE ")).expect("a TYPE");
            let (again, kind) = kind.split_once(' ').expect("a name and a type");
            assert_eq!(again, family);
            assert_name(family);
            let fresh = metrics.families.insert(family.to_owned(), kind.to_owned()).is_none();
            assert!(fresh, "{family} is defined twice");
            while let Some(sample) = lines.next_if(|line| !line.starts_with('#')) {
                metrics.sample(family, kind, sample);
            }
        }
        metrics.check_histograms();
        metrics
    }

    /// Returns the value of the sample that has exactly these labels.
    pub(crate) fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let labels = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        self.samples.get(&(name.to_owned(), labels)).copied()
    }

    /// Returns the labels of every sample named `name`.
    pub(crate) fn labels(&self, name: &str) -> Vec<&Labels> {
        self.samples.keys().filter(|(found, _)| found == name).map(|(_, labels)| labels).collect()
    }

    fn sample(&mut self, family: &str, kind: &str, line: &str) {
        let (name, labels, value) = split(line);
        let suffix = name.strip_prefix(family).unwrap_or_else(|| panic!("{line} in {family}"));
        let suffixes: &[&str] = match kind {
            "gauge" => &[""],
            "counter" => &["_total"],
            "info" => &["_info"],
            "histogram" => &["_bucket", "_sum", "_count"],
            other => panic!("type {other}"),
        };
        assert!(suffixes.contains(&suffix), "{line} in {family}, a {kind}");
        assert_eq!(labels.contains_key("le"), suffix == "_bucket", "{line}");
        if ["counter", "histogram"].contains(&kind) {
            assert!(value >= 0.0 && value.is_finite(), "{line}");
        }
        let key = (name.to_owned(), labels);
        assert!(self.samples.insert(key, value).is_none(), "duplicate sample: {line}");
    }

    fn check_histograms(&self) {
        let mut buckets: BTreeMap<(String, Labels), Vec<(f64, f64)>> = BTreeMap::new();
        for ((name, labels), value) in &self.samples {
            let Some(family) = name.strip_suffix("_bucket") else { continue };
            let mut labels = labels.clone();
            let bound = labels.remove("le").expect("checked before");
            let bound = if bound == "+Inf" { f64::INFINITY } else { bound.parse().unwrap() };
            buckets.entry((family.to_owned(), labels)).or_default().push((bound, *value));
        }
        for ((family, labels), mut buckets) in buckets {
            buckets.sort_by(|one, other| one.0.total_cmp(&other.0));
            assert!(buckets.is_sorted_by(|one, other| one.1 <= other.1), "{family}: {buckets:?}");
            let last = buckets.last().expect("at least one");
            assert_eq!(last.0, f64::INFINITY);
            let count = self.samples.get(&(format!("{family}_count"), labels));
            assert_eq!(count, Some(&last.1), "{family}");
        }
    }
}

/// Splits a line into the name, the labels and the value of a sample.
fn split(line: &str) -> (&str, Labels, f64) {
    let end = line.find(['{', ' ']).expect("a name");
    let (name, rest) = line.split_at(end);
    assert_name(name);
    let mut labels = Labels::new();
    let mut rest = rest;
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        let mut seen = BTreeSet::new();
        while !rest.starts_with('}') {
            let (label, value) = rest.split_once("=\"").unwrap_or_else(|| panic!("{line}"));
            assert_name(label);
            assert!(seen.insert(label), "duplicate label: {line}");
            let (value, behind) = unescape(value);
            labels.insert(label.to_owned(), value);
            rest = behind.strip_prefix(',').unwrap_or(behind);
            assert!(behind.starts_with([',', '}']), "{line}");
        }
        rest = &rest[1..];
    }
    let value = rest.strip_prefix(' ').unwrap_or_else(|| panic!("{line}"));
    (name, labels, value.parse().unwrap_or_else(|_| panic!("{value:?} in {line}")))
}

/// Decodes a quoted text up to its closing quote, and returns it with the rest of the line.
fn unescape(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return (value, &text[at + 1..]),
            '\\' => value.push(match characters.next().expect("an escaped character").1 {
                'n' => '\n',
                same @ ('\\' | '"') => same,
                other => panic!("invalid escape \\{other}"),
            }),
            plain => value.push(plain),
        }
    }
    panic!("no closing quote: {text}")
}

fn assert_name(name: &str) {
    let word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    assert!(name.starts_with(|c: char| c.is_ascii_lowercase()) && name.chars().all(word), "{name}");
}
