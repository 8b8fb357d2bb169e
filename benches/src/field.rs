//! Counters of a mount: numbers in `dray status TARGET --json`.

use std::process::Command;

use crate::json::Value;
use crate::{CommandResult, context};

/// Which fields are read, and by which command.
#[derive(Clone, Debug)]
pub struct StatusFields {
    /// A shell command that prints one JSON value.
    pub command: String,
    /// What we call each, and its path in the value: `round_trips=rpc.calls`.
    pub paths: Vec<(String, String)>,
}

impl StatusFields {
    /// From `name=path,name=path`.
    pub fn new(command: &str, paths: &str) -> StatusFields {
        let pairs = paths.split(',').filter_map(|pair| pair.split_once('='));
        StatusFields {
            command: command.to_owned(),
            paths: pairs.map(|(name, path)| (name.to_owned(), path.to_owned())).collect(),
        }
    }

    /// Reads them all now; a field that is not there is none.
    pub fn read(&self) -> CommandResult<Vec<Option<f64>>> {
        if self.paths.is_empty() {
            return Ok(Vec::new());
        }
        let output = Command::new("sh").args(["-c", &self.command]).output();
        let output = output.map_err(context(&self.command))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let value = Value::parse(&text).ok_or_else(|| format!("{}: no JSON", self.command))?;
        Ok(self.paths.iter().map(|(_, path)| sum_at(&value, path)).collect())
    }
}

/// The number at `path` (keys joined by dots). In an array every element is looked at,
/// and what is found is added up.
pub fn sum_at(value: &Value, path: &str) -> Option<f64> {
    match (value, path.split_once('.')) {
        (Value::List(items), _) => {
            let found: Vec<f64> = items.iter().filter_map(|item| sum_at(item, path)).collect();
            (!found.is_empty()).then(|| found.iter().sum())
        }
        (_, Some((key, rest))) => sum_at(value.get(key)?, rest),
        (_, None) => match value.get(path)? {
            Value::List(items) => Some(items.iter().filter_map(Value::number).sum()),
            other => other.number(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_and_added_up_over_arrays() {
        let value = Value::parse(r#"{"rpc": {"calls": 7}, "channels": [{"n": 1}, {"n": 2}]}"#);
        let value = value.unwrap();
        assert_eq!(sum_at(&value, "rpc.calls"), Some(7.0));
        assert_eq!(sum_at(&value, "channels.n"), Some(3.0));
        assert_eq!(sum_at(&value, "rpc.none"), None);
    }
}
