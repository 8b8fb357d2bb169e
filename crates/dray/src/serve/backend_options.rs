//! Which backend serves an export, and the options of an export that are its backend's own.

use std::collections::BTreeMap;
use std::path::Path;

use dray_backends::KINDS;
use dray_backends::backend::BackendKind;

use crate::serve::forward::{self, ForwardKind};
use crate::suggestions::hint;

/// The kinds that know wires, a line each. The others are those of [`dray_backends::KINDS`].
static WIRED_KINDS: &[&dyn BackendKind] = &[&ForwardKind];

/// Every kind of backend.
pub fn kinds() -> impl Iterator<Item = &'static dyn BackendKind> {
    KINDS.iter().chain(WIRED_KINDS).copied()
}

/// Options of a backend's own, as the administrator wrote them.
pub type BackendOptions = BTreeMap<String, String>;

/// The backend of exports that name none.
pub fn default_backend() -> &'static dyn BackendKind {
    KINDS[0]
}

/// The backend that is called so.
pub fn backend_of(name: &str) -> Result<&'static dyn BackendKind, String> {
    let names = || kinds().map(|kind| kind.name());
    let found = kinds().find(|kind| kind.name() == name);
    found.ok_or_else(|| format!("no backend is called `{name}`{}", hint(name, names())))
}

/// The backend of an export whose files are at `dir`: the one that it names, if it names one.
pub fn backend_at(dir: &Path, named: Option<&str>) -> Result<&'static dyn BackendKind, String> {
    match named {
        Some(name) => backend_of(name),
        None if forward::is_target(dir) => Ok(&ForwardKind),
        None => Ok(default_backend()),
    }
}

/// The backend of an `[[export]]`.
pub fn backend_in(export: &toml::Table) -> Result<&'static dyn BackendKind, String> {
    let word = |key: &str| export.get(key).and_then(toml::Value::as_str);
    backend_at(Path::new(word("dir").unwrap_or_default()), word("backend"))
}

/// The options of an `[[export]]` that are its backend's own, as words.
pub fn own_options(
    backend: &dyn BackendKind,
    export: &toml::Table,
) -> Result<BackendOptions, String> {
    let given = backend.options().iter().filter_map(|key| Some((*key, export.get(*key)?)));
    let word = |(key, value): (&str, &toml::Value)| {
        let word = match value {
            toml::Value::Boolean(true) => "yes".to_owned(),
            toml::Value::Boolean(false) => "no".to_owned(),
            toml::Value::Integer(number) => number.to_string(),
            toml::Value::String(text) => text.clone(),
            toml::Value::Float(_)
            | toml::Value::Datetime(_)
            | toml::Value::Array(_)
            | toml::Value::Table(_) => {
                return Err(format!(
                    "`{key}` in [[export]] is true, false, a whole number, or text in quotes"
                ));
            }
        };
        Ok((key.to_owned(), word))
    };
    given.map(word).collect()
}

/// Whether some backend has an option of this name.
pub fn is_of_a_backend(key: &str) -> bool {
    kinds().any(|kind| kind.options().contains(&key))
}
