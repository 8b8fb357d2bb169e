//! Which backend serves an export, and the options of an export that are its backend's own.

use std::collections::BTreeMap;

use dray_backends::KINDS;
use dray_backends::backend::BackendKind;

use crate::suggestions::hint;

/// Options of a backend's own, as the administrator wrote them.
pub type BackendOptions = BTreeMap<String, String>;

/// The backend of exports that name none.
pub fn default_backend() -> &'static dyn BackendKind {
    KINDS[0]
}

/// The backend that is called so.
pub fn backend_of(name: &str) -> Result<&'static dyn BackendKind, String> {
    let names = || KINDS.iter().map(|kind| kind.name());
    let found = KINDS.iter().copied().find(|kind| kind.name() == name);
    found.ok_or_else(|| format!("no backend is called `{name}`{}", hint(name, names())))
}

/// The backend that an `[[export]]` names.
pub fn backend_in(export: &toml::Table) -> Result<&'static dyn BackendKind, String> {
    let name = export.get("backend").and_then(toml::Value::as_str);
    name.map_or(Ok(default_backend()), backend_of)
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
    KINDS.iter().any(|kind| kind.options().contains(&key))
}
