//! Changes of rules that count beside the configuration: what an administrator has set or removed, at this server
//! or at another one of the projection.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use toml::Table;

/// Changes of one export that are remembered. Rules alone are fewer.
const CHANGES_MAX: usize = 2048;

/// When a rule was changed, and by which server of the projection. Of two changes of one rule the later one counts,
/// wherever they were made and in whatever order they arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RuleStamp {
    /// Microseconds since 1970 by the clock of that server, but later than all changes that it knew.
    pub at_us: u64,
    /// The place of that server in the definition of the projection.
    pub server: u32,
}

/// One change of a rule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RuleChange {
    /// The rule's name.
    pub name: String,
    pub stamp: RuleStamp,
    /// As it was written; none: it was removed.
    pub rule: Option<Table>,
    /// The next start of a server has it, too.
    pub keep: bool,
    /// Why this server does not carry it out. It is no part of the change: others may.
    #[serde(skip)]
    pub refused: Option<String>,
}

/// The newest change of each rule of one export.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RuleChanges(BTreeMap<String, RuleChange>);

impl RuleChanges {
    pub fn get(&self, name: &str) -> Option<&RuleChange> {
        self.0.get(name)
    }

    pub fn iter(&self) -> impl Iterator<Item = &RuleChange> {
        self.0.values()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut RuleChange> {
        self.0.values_mut()
    }

    pub fn forget(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// The newest of all.
    pub fn last(&self) -> RuleStamp {
        self.iter().map(|change| change.stamp).max().unwrap_or_default()
    }

    /// Whether this one is not known yet, and none after it.
    pub fn is_news(&self, change: &RuleChange) -> bool {
        self.get(&change.name).is_none_or(|known| known.stamp < change.stamp)
    }

    /// Takes it if it is news. The oldest removals are forgotten if there are too many changes. Errors: these
    /// are all rules.
    pub fn take(&mut self, change: RuleChange) -> Result<(), String> {
        if !self.is_news(&change) {
            return Ok(());
        }
        if self.0.len() >= CHANGES_MAX && !self.0.contains_key(&change.name) {
            let removals = self.iter().filter(|one| one.rule.is_none());
            let oldest = removals.min_by_key(|one| one.stamp).map(|one| one.name.clone());
            let oldest = oldest.ok_or_else(|| {
                format!("more than {CHANGES_MAX} rules are set: put rules into the configuration")
            })?;
            self.0.remove(&oldest);
        }
        self.0.insert(change.name.clone(), change);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(name: &str, at_us: u64, server: u32, is_rule: bool) -> RuleChange {
        RuleChange {
            name: name.to_owned(),
            stamp: RuleStamp { at_us, server },
            rule: is_rule.then(Table::new),
            keep: false,
            refused: None,
        }
    }

    #[test]
    fn the_later_change_counts_in_whatever_order_they_come() {
        let all = [change("a", 5, 1, true), change("a", 5, 2, false), change("a", 4, 9, true)];
        for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
            let mut changes = RuleChanges::default();
            order.iter().for_each(|at| changes.take(all[*at].clone()).unwrap());
            assert_eq!(changes.get("a"), Some(&all[1]), "{order:?}");
        }
    }

    #[test]
    fn old_removals_make_room_and_rules_do_not() {
        let mut changes = RuleChanges::default();
        for at in 0..CHANGES_MAX as u64 {
            changes.take(change(&at.to_string(), at + 1, 0, at > 1)).unwrap();
        }
        changes.take(change("x", 9999, 0, true)).unwrap();
        assert!(changes.get("0").is_none() && changes.get("1").is_some());
        changes.take(change("y", 9999, 0, true)).unwrap();
        assert!(changes.take(change("z", 9999, 0, true)).unwrap_err().contains("configuration"));
    }
}
