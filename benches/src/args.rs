//! Arguments of the form `--name value`, and the rest.

use crate::CommandResult;

/// The arguments of one command.
pub struct BenchArgs {
    named: Vec<(String, String)>,
    plain: Vec<String>,
}

impl BenchArgs {
    /// Sorts arguments into named ones and the rest. Every `--name` takes a value.
    pub fn new(mut args: impl Iterator<Item = String>) -> CommandResult<BenchArgs> {
        let (mut named, mut plain) = (Vec::new(), Vec::new());
        while let Some(arg) = args.next() {
            match arg.strip_prefix("--") {
                Some("") => plain.extend(args.by_ref()),
                Some(name) => {
                    let value = args.next().ok_or_else(|| format!("--{name} needs a value"))?;
                    named.push((name.to_owned(), value));
                }
                None => plain.push(arg),
            }
        }
        Ok(BenchArgs { named, plain })
    }

    /// The value of `--name`, if given.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.named.iter().rev().find(|(known, _)| known == name).map(|(_, value)| &value[..])
    }

    /// The value of `--name`.
    pub fn need(&self, name: &str) -> CommandResult<&str> {
        self.get(name).ok_or_else(|| format!("--{name} is missing"))
    }

    /// The value of `--name` as a number, or the default.
    pub fn number<T: std::str::FromStr>(&self, name: &str, default: T) -> CommandResult<T> {
        match self.get(name) {
            None => Ok(default),
            Some(text) => text.parse().map_err(|_| format!("--{name} {text}: no number")),
        }
    }

    /// The value of `--name` as process ids, separated by commas or spaces; none: empty.
    pub fn pids(&self, name: &str) -> CommandResult<Vec<i32>> {
        let parts = self.get(name).unwrap_or("").split([',', ' ']).filter(|part| !part.is_empty());
        parts.map(|part| part.parse().map_err(|_| format!("--{name}: {part}: no pid"))).collect()
    }

    /// What has no name.
    pub fn plain(&self) -> &[String] {
        &self.plain
    }
}
