//! Changes of rules that the next start of the server is to know: a file in the state directory.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use toml::Table;

use super::Written;
use crate::error::{ErrorContext, Failure};
use crate::serve::config::read_text;

const FILE_NAME: &str = "qos.json";

/// By name: a rule that takes the place of the configured one, or none in its place.
#[derive(Clone, Debug, Default)]
pub struct KeptRules(BTreeMap<String, Option<Table>>);

impl KeptRules {
    /// What was kept; nothing if there is no file. Errors: it cannot be read or understood.
    pub fn read(state_dir: &Path) -> Result<KeptRules, Failure> {
        let path = state_dir.join(FILE_NAME);
        if matches!(fs::metadata(&path), Err(error) if error.kind() == io::ErrorKind::NotFound) {
            return Ok(KeptRules::default());
        }
        let text = read_text(&path, "file of kept rules")?;
        let shown = path.display();
        let rules = serde_json::from_str(&text);
        rules.map(KeptRules).doing(|| format!("{shown} is damaged; remove it to begin without it"))
    }

    /// The configured rules with what was changed.
    pub fn applied_to(&self, configured: &Written) -> Written {
        let mut rules = configured.clone();
        for (name, rule) in &self.0 {
            match rule {
                Some(rule) => rules.insert(name.clone(), rule.clone()),
                None => rules.remove(name),
            };
        }
        rules
    }

    /// Notes a change. A rule that is removed, and not configured, leaves nothing behind.
    pub fn change(&mut self, name: &str, rule: Option<Table>, configured: &Written) {
        match rule.is_none() && !configured.contains_key(name) {
            true => self.0.remove(name),
            false => self.0.insert(name.to_owned(), rule),
        };
    }

    /// Errors: those of writing to the state directory.
    pub fn write(&self, state_dir: &Path) -> io::Result<()> {
        let (path, new) = (state_dir.join(FILE_NAME), state_dir.join("qos.json.new"));
        let mut file = File::create(&new)?;
        file.write_all(&serde_json::to_vec_pretty(&self.0)?)?;
        file.sync_all()?;
        fs::rename(new, path)?;
        File::open(state_dir)?.sync_all()
    }
}
