//! Rules as administrators write them, in the configuration and on the command line.

use dray_core::glob_matches;
use dray_layers::qos::rules::Amount;
use dray_layers::qos::{Pattern, QosRule, RuleKey};
use toml::{Table, Value};

use super::names;
use crate::suggestions::{hint, meant};

/// A rule, and the exports that it is for.
#[derive(Clone, Debug)]
pub struct PlacedRule {
    pub rule: QosRule,
    /// Patterns of names; none: all exports.
    exports: Vec<String>,
}

impl PlacedRule {
    /// Whether it counts in this export.
    pub fn is_for(&self, export: &str) -> bool {
        let fits = |one: &String| glob_matches(one.as_bytes(), export.as_bytes());
        self.exports.is_empty() || self.exports.iter().any(fits)
    }
}

const KEYS: [&str; 11] = [
    "match",
    "within",
    "each",
    "weight",
    "reservation",
    "reservation_ops",
    "limit",
    "limit_ops",
    "burst",
    "background",
    "in_service",
];
const MATCH_KEYS: [&str; 7] = ["export", "job", "user", "group", "project", "node", "op"];
/// Longest value of a key, bytes.
const VALUE_MAX_BYTES: usize = 128;
/// Values of one key.
const VALUES_MAX: usize = 256;

/// The rule of this name in its table. Errors: what is wrong with it.
pub fn rule_of(name: &str, table: &Table) -> Result<PlacedRule, String> {
    read(name, table).map_err(|what| format!("[qos.rule.{name}]: {what}"))
}

fn read(name: &str, table: &Table) -> Result<PlacedRule, String> {
    if let Some(key) = table.keys().find(|key| !KEYS.contains(&key.as_str())) {
        let hint = match MATCH_KEYS.contains(&key.as_str()) {
            true => format!("; it belongs into match = {{ {key} = ... }}"),
            false => hint(key, KEYS.iter().copied()),
        };
        return Err(format!("unknown key `{key}`{hint}"));
    }
    let mut rule = QosRule { name: name.to_owned(), ..QosRule::default() };
    let mut exports = Vec::new();
    for (key, value) in table {
        match key.as_str() {
            "match" => exports = read_match(value, &mut rule)?,
            "within" => rule.within = Some(text(key, value)?),
            "each" => rule.each = Some(key_of(&text(key, value)?)?),
            "weight" => rule.weight_milli = Some(weight(value)?),
            "reservation" => rule.reservation = Some(amount(key, value, bytes)?),
            "reservation_ops" => rule.reservation_ops = Some(amount(key, value, number)?),
            "limit" => rule.limit = Some(amount(key, value, bytes)?),
            "limit_ops" => rule.limit_ops = Some(amount(key, value, number)?),
            "burst" => rule.burst_bytes = Some(size(key, value)?),
            "in_service" => rule.in_service_bytes = Some(size(key, value)?),
            _ => rule.background = flag(key, value)?,
        }
    }
    Ok(PlacedRule { rule, exports })
}

/// Fills in what the rule matches, and answers which exports.
fn read_match(value: &Value, rule: &mut QosRule) -> Result<Vec<String>, String> {
    let table = value.as_table().ok_or("match is a table: match = { user = \"alice\" }")?;
    let mut exports = Vec::new();
    for (key, value) in table {
        let values = values(key, value)?;
        match key.as_str() {
            "export" => exports = values,
            _ => {
                let Some(known) = RuleKey::named(key) else {
                    let hint = hint(key, MATCH_KEYS.iter().copied());
                    return Err(format!("unknown key `{key}` in match{hint}"));
                };
                let patterns: Result<Vec<_>, _> =
                    values.iter().map(|value| pattern(known, value)).collect();
                rule.matches.insert(known, patterns?);
            }
        }
    }
    Ok(exports)
}

fn pattern(key: RuleKey, value: &str) -> Result<Pattern, String> {
    match key {
        RuleKey::Node if is_no_address(value) => Err(format!(
            "`{value}` is no address of a node: write one such as 10.0.0.7, or 10.0.0.*"
        )),
        RuleKey::Job | RuleKey::Node => Ok(Pattern::Text(value.to_owned())),
        RuleKey::User => {
            ids(value, names::uid_of).ok_or_else(|| format!("there is no user `{value}`"))
        }
        RuleKey::Group => {
            ids(value, names::gid_of).ok_or_else(|| format!("there is no group `{value}`"))
        }
        RuleKey::Project => ids(value, names::project_of).ok_or_else(|| {
            format!("/etc/projid has no project `{value}`: give its number, or add it there")
        }),
        RuleKey::Op => Pattern::op(value).ok_or_else(|| {
            let known = dray_core::Op::ALL.iter().map(|op| op.name()).chain(["data", "metadata"]);
            format!("there is no operation `{value}`{}", hint(value, known))
        }),
    }
}

/// Whether a text looks like an IPv4 address, and is none. Other texts may be patterns, or addresses of other kinds.
fn is_no_address(text: &str) -> bool {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    text.contains('.')
        && text.split('.').all(is_number)
        && text.parse::<std::net::Ipv4Addr>().is_err()
}

/// A number, two numbers with `-` between them, `*`, or a name.
fn ids(value: &str, named: fn(&str) -> Option<u32>) -> Option<Pattern> {
    if value == "*" {
        return Some(Pattern::Ids(0, u32::MAX));
    }
    if let Ok(id) = value.parse() {
        return Some(Pattern::Ids(id, id));
    }
    let range = value.split_once('-');
    let range = range.and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
    match range {
        Some((first, last)) if first <= last => Some(Pattern::Ids(first, last)),
        Some(_) => None,
        None => named(value).map(|id| Pattern::Ids(id, id)),
    }
}

fn key_of(name: &str) -> Result<RuleKey, String> {
    RuleKey::named(name).ok_or_else(|| {
        let known = RuleKey::ALL.map(RuleKey::name);
        format!("each is one of {}, not `{name}`{}", known.join(", "), meant(name, known))
    })
}

/// One value, or a list of values.
fn values(key: &str, value: &Value) -> Result<Vec<String>, String> {
    let list = match value {
        Value::Array(list) => list.iter().map(|one| text(key, one)).collect(),
        one => text(key, one).map(|text| vec![text]),
    }?;
    match list.len() {
        1..=VALUES_MAX => Ok(list),
        0 => Err(format!("{key} = [] matches nothing: leave it out to match everything")),
        _ => Err(format!("{key} has more than {VALUES_MAX} values")),
    }
}

fn text(key: &str, value: &Value) -> Result<String, String> {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Integer(number) => number.to_string(),
        _ => return Err(format!("{key} is a text in quotes, or a list of such")),
    };
    match text.len() {
        1..=VALUE_MAX_BYTES => Ok(text),
        0 => Err(format!("{key} is empty")),
        _ => Err(format!("{key} is longer than {VALUE_MAX_BYTES} bytes")),
    }
}

fn flag(key: &str, value: &Value) -> Result<bool, String> {
    match value {
        Value::Boolean(flag) => Ok(*flag),
        Value::String(text) if text == "true" || text == "yes" => Ok(true),
        Value::String(text) if text == "false" || text == "no" => Ok(false),
        _ => Err(format!("{key} is true or false")),
    }
}

/// In thousandths.
fn weight(value: &Value) -> Result<u32, String> {
    let number = match value {
        Value::Integer(number) => *number as f64,
        Value::Float(number) => *number,
        Value::String(text) => text.parse().unwrap_or(f64::NAN),
        _ => f64::NAN,
    };
    match (0.001..=1e6).contains(&number) {
        true => Ok((number * 1000.0).round() as u32),
        false => Err("weight is a number from 0.001 to 1000000".to_owned()),
    }
}

fn amount(key: &str, value: &Value, units: fn(&str) -> Option<u64>) -> Result<Amount, String> {
    let text = text(key, value)?;
    let amount = match text.strip_suffix('%') {
        Some(percent) => percent.parse().ok().map(Amount::Percent),
        None => units(&text).map(Amount::Units),
    };
    amount.ok_or_else(|| {
        let (example, unit) =
            if key.ends_with("_ops") { ("5000", "calls") } else { ("200M", "bytes") };
        format!(
            "{key} = \"{text}\" is no number of {unit} a second: write \"{example}\" or \"20%\""
        )
    })
}

fn size(key: &str, value: &Value) -> Result<u64, String> {
    let text = text(key, value)?;
    bytes(&text).ok_or_else(|| format!("{key} = \"{text}\" is no size such as \"64M\""))
}

fn number(text: &str) -> Option<u64> {
    text.parse().ok()
}

/// With K, M, G or T for powers of 1024.
fn bytes(text: &str) -> Option<u64> {
    let upper = text.to_ascii_uppercase();
    let shift = match upper.as_bytes().last()? {
        b'K' => 10,
        b'M' => 20,
        b'G' => 30,
        b'T' => 40,
        _ => return upper.parse().ok(),
    };
    let number: u64 = upper[..upper.len() - 1].parse().ok()?;
    number.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use dray_layers::qos::RuleSet;

    use super::*;

    fn rules(text: &str) -> Result<Vec<PlacedRule>, String> {
        super::super::rules_in(&text.parse::<Table>().unwrap())
    }

    fn wrong(text: &str) -> String {
        let rules = match rules(text) {
            Ok(rules) => rules,
            Err(what) => return what,
        };
        let rules: Vec<_> = rules.into_iter().map(|one| one.rule).collect();
        RuleSet::new(&rules).unwrap_err().0
    }

    #[test]
    fn rules_are_read() {
        let text = "[rule.sims]\nmatch = { job = \"sim*\", user = [1000, \"2000-2999\", \"root\"], \
                    export = \"ho*\" }\nreservation = \"200M\"\nweight = 2.5\nlimit = \"1G\"\nlimit_ops = 1000";
        let placed = rules(text).unwrap().remove(0);
        assert!(placed.is_for("home") && !placed.is_for("sw"));
        let rule = placed.rule;
        assert_eq!((rule.weight_milli, rule.limit), (Some(2500), Some(Amount::Units(1 << 30))));
        assert_eq!(rule.limit_ops, Some(Amount::Units(1000)));
        let users = [Pattern::Ids(1000, 1000), Pattern::Ids(2000, 2999), Pattern::Ids(0, 0)];
        assert_eq!(rule.matches[&RuleKey::User], users);
    }

    // proves: P197
    #[test]
    fn what_is_wrong_with_a_rule_is_said() {
        let cases = [
            ("[rule.a]\nlimt = 1", "unknown key `limt`; did you mean `limit`?"),
            ("[rule.a]\nuser = 1", "belongs into match = { user = ... }"),
            ("[rule.a]\nmatch = { usr = 1 }", "unknown key `usr` in match"),
            ("[rule.a]\nmatch = { project = \"no-such\" }", "has no project `no-such`"),
            ("[rule.a]\nmatch = { user = \"nobody-here\" }", "there is no user `nobody-here`"),
            ("[rule.a]\nmatch = { op = \"raed\" }", "there is no operation `raed`"),
            ("[rule.a]\nmatch = { user = 1 }\nlimit = 0", "limit = 0 would let no call through"),
            ("[rule.a]\nmatch = { user = 1 }\nreservation = 0", "reservation = 0 reserves nothing"),
            ("[rule.a]\nmatch = { node = \"300.1.1.1\" }", "is no address of a node"),
            ("[rule.a]\neach = \"usr\"", "not `usr`; did you mean `user`?"),
            ("[rule.a]\nlimit = 9\n[rule.h]\nwithin = \"nope\"", "there is no rule `nope`"),
            (
                "[rule.a]\nlimit = 9\n[rule.h]\nwithin = \"a\"",
                "`h`: it is within a rule, and needs `match` or `each`",
            ),
            ("[rule.a]\nmatch = { user = 1 }\nlimit = \"120%\"", "more than the whole"),
            ("[rule.a]\nmatch = { user = 1 }\nlimit = \"20%\"", "the export has none"),
            ("[rule.a]\nmatch = { user = 1 }\nlimit = \"fast\"", "no number of bytes a second"),
            ("[rule.a]\nmatch = { user = 1 }\nweight = 0", "weight is a number"),
            ("[rule.a]\nweight = 2", "shares with nobody"),
            ("[rule.a]\nlimit = 1\n[rule.b]\nlimit = 2", "both of the export as a whole"),
            (
                "[rule.a]\nmatch = { user = \"1-5\" }\n[rule.b]\nmatch = { user = \"5-9\" }",
                "rules `a` and `b` overlap",
            ),
            (
                "[rule.a]\nmatch = { job = \"sim*\" }\n[rule.b]\nmatch = { job = \"*x\" }",
                "rules `a` and `b` overlap",
            ),
            (
                "[rule.a]\nlimit = 10\n[rule.b]\nmatch = { user = 1 }\nreservation = 11",
                "more than the export's limit",
            ),
            (
                "[rule.b]\nmatch = { user = 1 }\nreservation = 11\nlimit = 10",
                "its reservation is more than its limit",
            ),
            ("[rule.b]\nmatch = { user = 1 }\nwithin = \"c\"", "there is no rule `c`"),
            ("[rule.b]\nmatch = { user = 1 }\nwithin = \"b\"", "within more than 4 rules"),
            ("[rules.b]\nlimit = 1", "unknown key `rules` in [qos]"),
        ];
        for (text, expected) in cases {
            let said = wrong(text);
            assert!(said.contains(expected), "{text}\n{said}");
        }
        // The more specific one wins.
        let text = "[rule.a]\nmatch = { user = \"1-5\" }\n[rule.b]\nmatch = { user = 5 }\n[rule.c]\nmatch = { \
                    job = \"*\" }\n[rule.d]\neach = \"user\"";
        let rules: Vec<_> = rules(text).unwrap().into_iter().map(|one| one.rule).collect();
        let set = RuleSet::new(&rules).unwrap();
        let order: Vec<_> = set.rules().iter().map(|one| one.rule.name.as_str()).collect();
        assert_eq!(order, ["c", "b", "a", "d"]);
    }
}
