//! Shares of bandwidth: rules of the configuration, rules that an administrator sets while the server
//! runs, and what is shown of them (docs/QOS.md).

mod exchange;
mod kept;
mod names;
mod parse;
mod shown;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_layers::qos::{QosGate, QosRule, RuleSet};
use serde_json::{Value, json};
use toml::Table;

use crate::control;
use crate::error::Failure;
use crate::serve::export_state::ExportState;

pub use exchange::ShareExchanges;
use kept::KeptRules;
use parse::{PlacedRule, rule_of};
pub use shown::{metrics, shown};

/// The rules of a server, by name, as they were written.
type Written = BTreeMap<String, Table>;

/// The rules in the table `[qos]` of a configuration. Errors: what is wrong with one.
pub fn rules_in(qos: &Table) -> Result<Vec<PlacedRule>, String> {
    written_in(qos)?.iter().map(|(name, table)| rule_of(name, table)).collect()
}

fn written_in(qos: &Table) -> Result<Written, String> {
    if let Some(key) = qos.keys().find(|key| *key != "rule") {
        return Err(format!("unknown key `{key}` in [qos]: a rule is a table [qos.rule.NAME]"));
    }
    let Some(rules) = qos.get("rule") else { return Ok(Written::new()) };
    let rules = rules.as_table().ok_or("a rule is a table [qos.rule.NAME]")?;
    let read = |(name, rule): (&String, &toml::Value)| {
        let table = rule.as_table().ok_or_else(|| format!("[qos.rule.{name}] is no table"))?;
        Ok((name.clone(), table.clone()))
    };
    rules.iter().map(read).collect()
}

/// Who answers questions about shares.
pub struct QosControl {
    exports: Vec<(String, QosGate)>,
    exchanges: Arc<ShareExchanges>,
    state_dir: PathBuf,
    state: Mutex<State>,
}

struct State {
    /// The rules of the configuration.
    configured: Written,
    /// What the next start is to have in addition, or not.
    kept: KeptRules,
    now: Written,
}

impl QosControl {
    /// With the rules of the configuration, and what was kept of changes. Errors: rules that do not
    /// fit together, or a file of kept rules that cannot be read.
    pub fn start(
        qos: &Table,
        state_dir: &Path,
        (exports, exchanges): (&[Arc<ExportState>], &Arc<ShareExchanges>),
    ) -> Result<Arc<QosControl>, Failure> {
        let configured = written_in(qos).map_err(Failure::usage)?;
        let kept = KeptRules::read(state_dir)?;
        let now = kept.applied_to(&configured);
        let exports = exports.iter().map(|one| (one.name.clone(), one.qos.clone())).collect();
        let (state_dir, exchanges) = (state_dir.to_owned(), exchanges.clone());
        let state = Mutex::new(State { configured, kept, now });
        let control = QosControl { exports, exchanges, state_dir, state };
        let now = control.lock().now.clone();
        control.warn_of_unknown_exports(&now);
        control.apply(&now).map_err(Failure::usage)?;
        Ok(Arc::new(control))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes these the rules of all exports, or of none if something is wrong with one.
    fn apply(&self, written: &Written) -> Result<(), String> {
        let rules: Result<Vec<_>, _> =
            written.iter().map(|(name, table)| rule_of(name, table)).collect();
        let rules = rules?;
        let compiled: Result<Vec<_>, String> =
            self.exports.iter().map(|(name, _)| of_export(name, &rules)).collect();
        for ((_, gate), rules) in self.exports.iter().zip(compiled?) {
            gate.set_rules(rules);
        }
        self.exchanges.rules_changed();
        Ok(())
    }

    fn warn_of_unknown_exports(&self, written: &Written) {
        for (name, table) in written {
            let Ok(rule) = rule_of(name, table) else { continue };
            if !self.exports.iter().any(|(export, _)| rule.is_for(export)) {
                log::warn!("[qos.rule.{name}] is for an export that this server does not have");
            }
        }
    }

    /// The answer to a question over the control socket.
    pub fn answer(&self, question: &str) -> Value {
        let (what, rest) = control::parse(question);
        let outcome = match what {
            "show" => return self.show(),
            "set" => self.set(rest),
            "remove" => self.remove(rest),
            _ => Err(format!("unknown question `qos {what}`")),
        };
        match outcome {
            Ok(()) => json!({ "done": true }),
            Err(why) => control::refusal(&why),
        }
    }

    /// `live|keep NAME JSON`.
    fn set(&self, words: &str) -> Result<(), String> {
        let (how, rest) = control::parse(words);
        let (name, rule) = control::parse(rest);
        let table: Table = serde_json::from_str(rule).map_err(|_| "this is no rule".to_owned())?;
        let rule = rule_of(name, &table)?;
        if !self.exports.iter().any(|(export, _)| rule.is_for(export)) {
            return Err(format!("rule `{name}` is for an export that this server does not have"));
        }
        self.change(how == "keep", name, Some(table))
    }

    /// `live|keep NAME`.
    fn remove(&self, words: &str) -> Result<(), String> {
        let (how, name) = control::parse(words);
        if !self.lock().now.contains_key(name) {
            return Err(format!("there is no rule `{name}`: `dray qos show` names them"));
        }
        self.change(how == "keep", name, None)
    }

    fn change(&self, keep: bool, name: &str, rule: Option<Table>) -> Result<(), String> {
        let mut state = self.lock();
        let mut now = state.now.clone();
        match rule.clone() {
            Some(rule) => now.insert(name.to_owned(), rule),
            None => now.remove(name),
        };
        self.apply(&now)?;
        let before = std::mem::replace(&mut state.now, now);
        if !keep {
            return Ok(());
        }
        let mut kept = state.kept.clone();
        kept.change(name, rule, &state.configured);
        if let Err(error) = kept.write(&self.state_dir) {
            // All of it, or nothing.
            self.apply(&before)?;
            state.now = before;
            return Err(format!("the rule cannot be kept in the state directory: {error}"));
        }
        state.kept = kept;
        Ok(())
    }

    fn show(&self) -> Value {
        let now = self.lock().now.clone();
        let of = |export: &str| -> Value {
            let ours = now
                .iter()
                .filter(|(name, table)| rule_of(name, table).is_ok_and(|rule| rule.is_for(export)));
            ours.map(|(name, table)| (name.clone(), json!(table)))
                .collect::<serde_json::Map<_, _>>()
                .into()
        };
        let exports = self.exports.iter().map(
            |(name, gate)| json!({ "name": name, "rules": of(name), "qos": shown(&gate.report()) }),
        );
        json!({ "exports": exports.collect::<Vec<_>>() })
    }
}

fn of_export(export: &str, rules: &[PlacedRule]) -> Result<RuleSet, String> {
    let ours: Vec<QosRule> =
        rules.iter().filter(|rule| rule.is_for(export)).map(|rule| rule.rule.clone()).collect();
    RuleSet::new(&ours).map_err(|error| format!("export `{export}`: {error}"))
}
