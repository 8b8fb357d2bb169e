//! Rules: which calls are meant, and what they get.
//!
//! A call belongs to one rule. Of those that match it, the rule with the most telling key wins. The order of
//! keys is job, user, group, project, node, operation. Where two rules use the same
//! keys, one without wildcards comes first. Two that could match the same call, and neither of
//! which comes first, are refused. A rule within another one matches calls of that one only, and comes
//! before it.

use std::collections::BTreeMap;
use std::fmt;

use dray_core::{Gid, Op, Uid, glob_matches};

use super::bucket::Nanos;
use super::rule_keys::{Pattern, RuleKey};
use super::tree::Rates;

/// Rules of one export.
pub const RULES_MAX: usize = 1024;
/// Longest name of a rule, bytes.
const NAME_MAX_BYTES: usize = 64;
const MILLI_MAX: u32 = 1_000_000_000;

/// A number of units a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// So many.
    Units(u64),
    /// So many of a hundred of the export's limit.
    Percent(u32),
}

/// A rule as an administrator means it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QosRule {
    /// The rule's name.
    pub name: String,
    /// The calls that are meant: those for which each key has one of its values. None: the export.
    pub matches: BTreeMap<RuleKey, Vec<Pattern>>,
    /// The rule that it is a part of.
    pub within: Option<String>,
    /// One class for each value of this key; none: one class in all.
    pub each: Option<RuleKey>,
    /// Thousandths; none: 1000.
    pub weight_milli: Option<u32>,
    /// Bytes a second that it has in any case.
    pub reservation: Option<Amount>,
    /// Calls a second that it has in any case.
    pub reservation_ops: Option<Amount>,
    /// Bytes a second at most.
    pub limit: Option<Amount>,
    /// Calls a second at most.
    pub limit_ops: Option<Amount>,
    /// Bytes that it may take ahead of its limit; none: a tenth of a second's.
    pub burst_bytes: Option<u64>,
    /// The class yields to all others.
    pub background: bool,
    /// Of the export alone: bytes under way below at a time; none: by how long calls take.
    pub in_service_bytes: Option<u64>,
}

impl QosRule {
    /// Whether it is about the export as a whole.
    pub fn is_of_export(&self) -> bool {
        self.matches.is_empty() && self.each.is_none()
    }

    fn mask(&self) -> u32 {
        let bit = |key: &RuleKey| 1 << (RuleKey::ALL.len() - 1 - *key as usize);
        self.matches.keys().map(bit).sum()
    }

    fn wildcards(&self) -> usize {
        let exact = |patterns: &&Vec<Pattern>| !patterns.iter().all(Pattern::is_exact);
        self.matches.values().filter(exact).count()
    }

    fn overlaps(&self, other: &QosRule) -> bool {
        let meet = |(key, ours): (&RuleKey, &Vec<Pattern>)| {
            let theirs = &other.matches[key];
            ours.iter().any(|one| theirs.iter().any(|other| one.meets(other)))
        };
        self.matches.keys().eq(other.matches.keys()) && self.matches.iter().all(meet)
    }

    /// What is wrong with it by itself.
    fn check(&self) -> Result<(), String> {
        let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
        if self.name.is_empty() || self.name.len() > NAME_MAX_BYTES || !self.name.bytes().all(sound)
        {
            return Err(format!(
                "a rule's name has up to {NAME_MAX_BYTES} letters, digits, `-`, `_`, `.` and `:`"
            ));
        }
        let wrong = |what: String| Err(format!("rule `{}`: {what}", self.name));
        let amounts = [
            ("reservation", self.reservation),
            ("reservation_ops", self.reservation_ops),
            ("limit", self.limit),
            ("limit_ops", self.limit_ops),
        ];
        for (key, amount) in amounts {
            match amount {
                Some(Amount::Units(0) | Amount::Percent(0)) if key.starts_with("reservation") => {
                    return wrong(format!("{key} = 0 reserves nothing: leave it out"));
                }
                Some(Amount::Units(0) | Amount::Percent(0)) => {
                    return wrong(format!("{key} = 0 would let no call through: leave it out"));
                }
                Some(Amount::Percent(percent)) if percent > 100 => {
                    return wrong(format!("{key} = \"{percent}%\" is more than the whole"));
                }
                Some(Amount::Percent(_)) if self.is_of_export() => {
                    return wrong(format!("{key} is a number for the export: a part is of that"));
                }
                _ => {}
            }
        }
        if self.weight_milli.is_some_and(|weight| weight == 0 || weight > MILLI_MAX) {
            return wrong("weight is a number from 0.001 to 1000000".to_owned());
        }
        if self.burst_bytes.is_some() && self.limit.is_none() {
            return wrong("burst belongs to a limit, and there is none".to_owned());
        }
        if self.burst_bytes == Some(0) || self.in_service_bytes == Some(0) {
            return wrong("burst and in_service are sizes from 1 on".to_owned());
        }
        if self.is_of_export() {
            if self.within.is_some() {
                return wrong("it is within a rule, and needs `match` or `each`".to_owned());
            }
            if self.reservation.or(self.reservation_ops).is_some() || self.weight_milli.is_some() {
                return wrong(
                    "it is of the export as a whole, which shares with nobody: weight and reservation \
                     belong to a rule with `match`"
                        .to_owned(),
                );
            }
        } else if self.in_service_bytes.is_some() {
            return wrong(
                "in_service belongs to the rule of an export, without `match`".to_owned(),
            );
        }
        Ok(())
    }
}

/// Who makes a call, as rules see it.
#[derive(Clone, Copy, Debug)]
pub struct Caller<'a> {
    /// The batch job; may be empty.
    pub job: &'a str,
    /// The user.
    pub uid: Uid,
    /// The user's group.
    pub gid: Gid,
    /// The user's other groups.
    pub groups: &'a [Gid],
    /// The project of the file or directory; 0: it has none, or is not known.
    pub project: u32,
    /// The address of the client.
    pub node: &'a str,
    /// The operation.
    pub op: Op,
}

impl Caller<'_> {
    fn is_meant(&self, key: RuleKey, pattern: &Pattern) -> bool {
        let in_ids = |id: u32| matches!(pattern, Pattern::Ids(a, b) if (*a..=*b).contains(&id));
        match (key, pattern) {
            (RuleKey::Job, Pattern::Text(text)) => {
                glob_matches(text.as_bytes(), self.job.as_bytes())
            }
            (RuleKey::Node, Pattern::Text(text)) => {
                glob_matches(text.as_bytes(), self.node.as_bytes())
            }
            (RuleKey::User, _) => in_ids(self.uid.0),
            (RuleKey::Group, _) => {
                in_ids(self.gid.0) || self.groups.iter().any(|gid| in_ids(gid.0))
            }
            (RuleKey::Project, _) => in_ids(self.project),
            (RuleKey::Op, Pattern::Ops(ops)) => ops & 1 << (self.op as u64) != 0,
            (RuleKey::Job | RuleKey::Node | RuleKey::Op, _) => false,
        }
    }

    /// The value of a key, as the name of a class.
    fn value(&self, key: RuleKey) -> String {
        match key {
            RuleKey::Job => self.job.to_owned(),
            RuleKey::User => self.uid.0.to_string(),
            RuleKey::Group => self.gid.0.to_string(),
            RuleKey::Project => self.project.to_string(),
            RuleKey::Node => self.node.to_owned(),
            RuleKey::Op => self.op.name().to_owned(),
        }
    }
}

/// One rule, with its numbers in units.
#[derive(Clone, Debug)]
pub struct CompiledRule {
    /// The rule.
    pub rule: QosRule,
    /// What each of its classes gets.
    pub rates: Rates,
    /// The place of the rule that it is within.
    pub parent: Option<usize>,
}

/// The rules of one export, in the order in which they are tried.
#[derive(Clone, Debug, Default)]
pub struct RuleSet {
    rules: Vec<CompiledRule>,
    root: Rates,
    in_service_bytes: Option<u64>,
    /// Whether classes depend on the operation.
    by_op: bool,
    /// Whether they depend on the project of a file.
    by_project: bool,
    /// Whether there is any rule.
    is_on: bool,
}

/// A rule that may not be as it is, or not beside another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleError(pub String);

impl fmt::Display for RuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl RuleSet {
    /// Of all rules that are about one export. Errors: what is wrong with one of them, or between two.
    pub fn new(rules: &[QosRule]) -> Result<RuleSet, RuleError> {
        RuleSet::compile(rules).map_err(RuleError)
    }

    fn compile(rules: &[QosRule]) -> Result<RuleSet, String> {
        if rules.len() > RULES_MAX {
            return Err(format!("more than {RULES_MAX} rules"));
        }
        for rule in rules {
            let is_there = |name: &String| rules.iter().any(|other| other.name == *name);
            if let Some(name) = rule.within.as_ref().filter(|name| !is_there(name)) {
                return Err(format!("rule `{}`: there is no rule `{name}`", rule.name));
            }
            rule.check()?;
        }
        let mut names: Vec<&str> = rules.iter().map(|rule| rule.name.as_str()).collect();
        names.sort_unstable();
        if let Some(two) = names.windows(2).find(|two| two[0] == two[1]) {
            return Err(format!("two rules are called `{}`", two[0]));
        }
        let mut wholes = rules.iter().filter(|rule| rule.is_of_export());
        let whole = wholes.next();
        if let Some((one, other)) = whole.zip(wholes.next()) {
            let (one, other) = (&one.name, &other.name);
            return Err(format!("rules `{one}` and `{other}` are both of the export as a whole"));
        }
        let inherited: Result<Vec<_>, String> = rules
            .iter()
            .filter(|rule| !rule.is_of_export())
            .map(|rule| inherit(rule, rules))
            .collect();
        let mut sorted = inherited?;
        sorted.sort_by(|one, other| one.order().cmp(&other.order()));
        check_overlaps(&sorted)?;
        let sorted: Vec<&QosRule> = sorted.iter().map(|one| &one.rule).collect();
        let unit = whole.cloned().unwrap_or_default();
        let root = rates(&unit, &unit)?;
        let compiled: Result<Vec<_>, String> = sorted
            .iter()
            .map(|rule| {
                let parent = parent_of(rule, &sorted)?;
                Ok(CompiledRule { rule: (*rule).clone(), rates: rates(rule, &unit)?, parent })
            })
            .collect();
        let rules_of = compiled?;
        check_reservations(&rules_of, &root)?;
        let by = |key: RuleKey| {
            let uses = |rule: &QosRule| rule.matches.contains_key(&key) || rule.each == Some(key);
            rules_of.iter().any(|compiled| uses(&compiled.rule))
        };
        Ok(RuleSet {
            by_op: by(RuleKey::Op),
            by_project: by(RuleKey::Project),
            rules: rules_of,
            root,
            in_service_bytes: unit.in_service_bytes,
            is_on: !rules.is_empty(),
        })
    }

    /// Whether there is any rule.
    pub fn is_on(&self) -> bool {
        self.is_on
    }

    /// Whether any class has a limit or a reservation.
    pub fn has_rates(&self) -> bool {
        let of_rules = self.rules.iter().any(|rule| !rule.rates.is_free());
        of_rules || !self.root.is_free()
    }

    /// Whether the operation tells to which class a call belongs.
    pub fn by_op(&self) -> bool {
        self.by_op
    }

    /// Whether the project of a file does.
    pub fn by_project(&self) -> bool {
        self.by_project
    }

    /// All but that of the export, in the order in which they are tried.
    pub fn rules(&self) -> &[CompiledRule] {
        &self.rules
    }

    /// Of the export as a whole.
    pub fn root(&self) -> Rates {
        self.root
    }

    /// Bytes under way at a time, where that is fixed.
    pub fn in_service_bytes(&self) -> Option<u64> {
        self.in_service_bytes
    }

    /// The rule of a call, and the name of its class among those of the rule; none: the call
    /// belongs to no rule.
    pub fn classify(&self, caller: &Caller<'_>) -> Option<(usize, String)> {
        let is_meant = |rule: &&CompiledRule| {
            let mut keys = rule.rule.matches.iter();
            keys.all(|(key, patterns)| patterns.iter().any(|one| caller.is_meant(*key, one)))
        };
        let index = self.rules.iter().position(|rule| is_meant(&rule))?;
        let each = self.rules[index].rule.each;
        Some((index, each.map_or(String::new(), |key| caller.value(key))))
    }
}

/// A rule that also matches what those above it match.
struct InheritedRule {
    rule: QosRule,
    /// The names of the rules that it is within, the nearest first.
    above: Vec<String>,
}

impl InheritedRule {
    /// Rules are tried in this order.
    fn order(&self) -> (u32, usize, usize, &str) {
        let InheritedRule { rule, above } = self;
        (u32::MAX - rule.mask(), rule.wildcards(), DEPTH_MAX - above.len(), &rule.name)
    }

    fn is_beside(&self, other: &InheritedRule) -> bool {
        !self.above.contains(&other.rule.name) && !other.above.contains(&self.rule.name)
    }
}

fn inherit(rule: &QosRule, rules: &[QosRule]) -> Result<InheritedRule, String> {
    let (mut inherited, mut above) = (rule.clone(), Vec::new());
    let mut within = &rule.within;
    while let Some(name) = within {
        let ours = &rule.name;
        if above.len() == DEPTH_MAX {
            return Err(format!("rule `{ours}` is within more than {DEPTH_MAX} rules"));
        }
        let parent = rules.iter().find(|other| other.name == *name && !other.is_of_export());
        let parent = parent.ok_or_else(|| {
            format!(
                "rule `{ours}`: `{name}` is of the export as a whole, and has no rules within it"
            )
        })?;
        for (key, patterns) in &parent.matches {
            inherited.matches.entry(*key).or_insert_with(|| patterns.clone());
        }
        above.push(name.clone());
        within = &parent.within;
    }
    Ok(InheritedRule { rule: inherited, above })
}

fn check_overlaps(sorted: &[InheritedRule]) -> Result<(), String> {
    for (index, one) in sorted.iter().enumerate() {
        let rank = |one: &InheritedRule| (one.rule.mask(), one.rule.wildcards());
        let equals = sorted[index + 1..].iter().take_while(|other| rank(other) == rank(one));
        for other in equals.filter(|other| other.is_beside(one)) {
            if one.rule.overlaps(&other.rule) {
                let (one, other) = (&one.rule.name, &other.rule.name);
                return Err(format!(
                    "rules `{one}` and `{other}` overlap: a call could belong to both, and none of them is \
                     more specific; add a key to one of them, or write its values without wildcards"
                ));
            }
        }
    }
    Ok(())
}

fn parent_of(rule: &QosRule, sorted: &[&QosRule]) -> Result<Option<usize>, String> {
    let Some(within) = &rule.within else { return Ok(None) };
    let name = &rule.name;
    let place = sorted.iter().position(|other| other.name == *within);
    let place = place.ok_or_else(|| format!("rule `{name}`: there is no rule `{within}`"))?;
    match sorted[place].each {
        None => Ok(Some(place)),
        Some(_) => Err(format!("rule `{name}`: `{within}` is one class for each of many already")),
    }
}

/// Rules within rules, at most.
const DEPTH_MAX: usize = 4;

/// That what is reserved is there, where the export has a limit.
fn check_reservations(rules: &[CompiledRule], root: &Rates) -> Result<(), String> {
    let sum = |of: fn(&Rates) -> u64| -> u64 {
        let ours = rules.iter().filter(|rule| rule.parent.is_none() && rule.rule.each.is_none());
        ours.map(|rule| of(&rule.rates)).fold(0, u64::saturating_add)
    };
    let bytes = (sum(|rates| rates.reservation), root.limit);
    let ops = (sum(|rates| rates.reservation_ops), root.limit_ops);
    for (reserved, limit) in [bytes, ops] {
        if limit > 0 && reserved > limit {
            return Err(format!(
                "all reservations together are {reserved} a second, more than the export's limit of {limit}"
            ));
        }
    }
    Ok(())
}

fn rates(rule: &QosRule, whole: &QosRule) -> Result<Rates, String> {
    let name = &rule.name;
    let units = |key: &str, amount: Option<Amount>, of: Option<Amount>| match (amount, of) {
        (None, _) => Ok(0),
        (Some(Amount::Units(units)), _) => Ok(units),
        (Some(Amount::Percent(percent)), Some(Amount::Units(whole))) => {
            let part = u128::from(whole) * u128::from(percent) / 100;
            Ok(u64::try_from(part).unwrap_or(u64::MAX).max(1))
        }
        (Some(Amount::Percent(_)), _) => Err(format!(
            "rule `{name}`: {key} is a part of the export's limit, and the export has none"
        )),
    };
    let limit = units("limit", rule.limit, whole.limit)?;
    let limit_ops = units("limit_ops", rule.limit_ops, whole.limit_ops)?;
    let reservation = units("reservation", rule.reservation, whole.limit)?;
    let reservation_ops = units("reservation_ops", rule.reservation_ops, whole.limit_ops)?;
    for (reserved, limit) in [(reservation, limit), (reservation_ops, limit_ops)] {
        if limit > 0 && reserved > limit {
            return Err(format!("rule `{name}`: its reservation is more than its limit"));
        }
    }
    let weight_milli = rule.weight_milli.unwrap_or(1000);
    let burst = match rule.burst_bytes {
        Some(bytes) if limit > 0 => {
            let time = u128::from(bytes) * 1_000_000_000 / u128::from(limit);
            Nanos::try_from(time).unwrap_or(Nanos::MAX).min(BURST_MAX)
        }
        _ => Rates::default().burst,
    };
    Ok(Rates {
        weight_milli: if rule.background { (weight_milli / 100).max(1) } else { weight_milli },
        reservation,
        reservation_ops,
        limit,
        limit_ops,
        burst,
    })
}

/// Longest burst, as time at the limit.
const BURST_MAX: Nanos = 60_000_000_000;
