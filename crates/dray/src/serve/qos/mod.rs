//! Shares of bandwidth: rules of the configuration, rules that an administrator sets while the server
//! runs, and what is shown of them (docs/QOS.md).

mod exchange;
mod kept;
mod live;
mod names;
mod parse;
mod questions;
mod rulebook;
mod shown;

use std::collections::BTreeMap;
use std::sync::Arc;

use dray_core::Fut;
use dray_rt::join_all;
use serde_json::{Map, Value, json};
use toml::Table;

use crate::control;
use crate::error::Failure;

use exchange::OtherAnswer;
pub use exchange::ShareExchanges;
use parse::{PlacedRule, rule_of};
pub use rulebook::{RuleBook, book_exports};
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

/// Answers questions about shares over the control socket.
pub struct QosControl {
    book: Arc<RuleBook>,
    exchanges: Arc<ShareExchanges>,
}

impl QosControl {
    /// Has the rules of the book count. Errors: they do not fit together.
    pub fn start(
        book: Arc<RuleBook>,
        exchanges: Arc<ShareExchanges>,
    ) -> Result<Arc<QosControl>, Failure> {
        book.begin().map_err(Failure::usage)?;
        exchanges.rules_changed();
        Ok(Arc::new(QosControl { book, exchanges }))
    }

    /// The answer to a question.
    pub async fn answer(&self, question: &str) -> Value {
        let (what, rest) = control::parse(question);
        let changed = match what {
            "show" => return self.show().await,
            "set" => self.set(rest),
            "remove" => self.remove(rest),
            _ => Err(format!("unknown question `qos {what}`")),
        };
        match changed {
            Ok((name, exports)) => self.pass_on(&name, &exports).await,
            Err(why) => control::refusal(&why),
        }
    }

    /// `live|keep NAME JSON`. Answers the name, and the exports that have changed.
    fn set(&self, words: &str) -> Result<(String, Vec<usize>), String> {
        let (how, rest) = control::parse(words);
        let (name, rule) = control::parse(rest);
        let table: Table = serde_json::from_str(rule).map_err(|_| "this is no rule".to_owned())?;
        Ok((name.to_owned(), self.book.set(name, &table, how == "keep")?))
    }

    /// `live|keep NAME`.
    fn remove(&self, words: &str) -> Result<(String, Vec<usize>), String> {
        let (how, name) = control::parse(words);
        Ok((name.to_owned(), self.book.remove(name, how == "keep")?))
    }

    /// Has the other servers of each export follow, and says what became of that.
    async fn pass_on(&self, name: &str, exports: &[usize]) -> Value {
        self.exchanges.rules_changed();
        let mut others = Vec::new();
        // All at the same time: a server that hangs is no reason for those of another projection to wait.
        let pass_on = |export: &usize| -> Fut<'static, _> {
            let (exchanges, export) = (self.exchanges.clone(), *export);
            Box::pin(async move { (export, exchanges.pass_rules_on(export).await) })
        };
        for (export, answers) in join_all(exports.iter().map(pass_on).collect()).await {
            for (server, answer) in answers {
                let projection = &self.book.exports()[export].name;
                let mut said = json!({ "server": server, "export": projection });
                match answer {
                    OtherAnswer::Said(refused) => {
                        said["refused"] = refused.get(name).cloned().into()
                    }
                    OtherAnswer::Away(why) => said["away"] = why.into(),
                }
                others.push(said);
            }
        }
        json!({ "done": true, "others": others })
    }

    /// Of each export what this server shows, and what each of the others does.
    async fn show(&self) -> Value {
        let mut exports = Vec::new();
        for (number, export) in self.book.exports().iter().enumerate() {
            let mut others = Vec::new();
            for (server, answer) in self.exchanges.ask_for_shown(number).await {
                let mut said = match answer {
                    OtherAnswer::Said(shown) => shown,
                    OtherAnswer::Away(why) => Map::from_iter([("away".to_owned(), why.into())]),
                };
                said.insert("server".to_owned(), server.into());
                others.push(Value::Object(said));
            }
            let mut shown = self.book.show(number);
            shown.insert("name".to_owned(), export.name.as_str().into());
            shown.insert("others".to_owned(), others.into());
            exports.push(Value::Object(shown));
        }
        json!({ "exports": exports })
    }
}
