//! What servers of a projection ask each other about rules. Questions and answers are JSON, in the batches of the
//! way by which servers exchange what they use. Both ends have proven that they are servers of the projection.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::live::RuleChange;
use super::rulebook::RuleBook;

/// Longest question or answer, bytes: what one batch takes, with room for what is around it.
const PART_MAX_BYTES: usize = 512 << 10;

/// A question of another server.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ShareQuestion {
    /// Takes these changes. The answer is a [`TakenAnswer`].
    Take(Vec<RuleChange>),
    /// All changes from this number on. The answer is a [`ChangesAnswer`].
    ChangesFrom(usize),
    /// What `dray qos show` says of the export.
    Show,
}

/// Which of the changes do not count.
#[derive(Debug, Default, Deserialize, Serialize)]
pub struct TakenAnswer {
    /// By rule: why not.
    pub refused: Map<String, Value>,
}

/// Some changes, in their order.
#[derive(Debug, Default, Deserialize, Serialize)]
pub struct ChangesAnswer {
    pub changes: Vec<RuleChange>,
    /// Whether others follow.
    pub more: bool,
}

/// As many of these as a question or an answer takes, at least one. A rule is shorter than that by far.
pub fn part_of(changes: &[RuleChange]) -> &[RuleChange] {
    let mut bytes = 0;
    let fits = changes.iter().take_while(|change| {
        bytes += serde_json::to_vec(change).map_or(PART_MAX_BYTES, |text| text.len());
        bytes <= PART_MAX_BYTES
    });
    let count = fits.count().max(1).min(changes.len());
    &changes[..count]
}

/// The answer of this server about the export with this number. Errors: it is no question.
pub fn answer(book: &RuleBook, at: usize, question: &[u8]) -> serde_json::Result<Vec<u8>> {
    match serde_json::from_slice(question)? {
        ShareQuestion::Take(changes) => {
            let taken = book.take(at, changes).into_iter();
            let refused = taken.filter_map(|one| Some((one.name, json!(one.refused?))));
            serde_json::to_vec(&TakenAnswer { refused: refused.collect() })
        }
        ShareQuestion::ChangesFrom(from) => {
            let all = book.changes(at).1;
            let rest = all.get(from..).unwrap_or_default();
            let changes = part_of(rest).to_vec();
            let more = changes.len() < rest.len();
            serde_json::to_vec(&ChangesAnswer { changes, more })
        }
        ShareQuestion::Show => serde_json::to_vec(&shown_within(book.show(at), PART_MAX_BYTES)),
    }
}

/// What is shown, with as many classes and rules as an answer takes.
fn shown_within(mut shown: Map<String, Value>, most_bytes: usize) -> Map<String, Value> {
    while serde_json::to_vec(&shown).is_ok_and(|text| text.len() > most_bytes) {
        let Some(qos) = shown.get_mut("qos") else { break };
        let left_out = qos["classes_left_out"].as_u64().unwrap_or_default();
        match qos["classes"].as_array_mut().filter(|classes| !classes.is_empty()) {
            Some(classes) => {
                let half = classes.len() / 2;
                let cut = (classes.len() - half) as u64;
                classes.truncate(half);
                qos["classes_left_out"] = json!(left_out + cut);
            }
            None => {
                shown.insert("rules".to_owned(), json!({}));
                break;
            }
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_answer_leaves_classes_out_and_says_so() {
        let class = json!({ "rule": "x".repeat(100) });
        let qos = json!({ "classes": vec![class; 64], "classes_left_out": 3 });
        let shown = json!({ "rules": { "a": "b" }, "qos": qos });
        let shown = shown.as_object().unwrap().clone();
        let cut = shown_within(shown.clone(), 2000);
        let kept = cut["qos"]["classes"].as_array().unwrap().len() as u64;
        assert!(kept > 0 && kept < 20);
        assert_eq!(cut["qos"]["classes_left_out"], 64 - kept + 3);
        assert_eq!(shown_within(shown.clone(), 1 << 20), shown);
    }

    #[test]
    fn what_is_no_question_is_no_panic() {
        let book = RuleBook::new(&toml::Table::new(), std::path::Path::new("/nowhere"), Vec::new());
        let book = book.unwrap();
        for question in [&b""[..], b"{}", b"\xff", b"{\"take\": [1]}", b"{\"changes_from\": -1}"] {
            assert!(answer(&book, 0, question).is_err());
        }
    }
}
