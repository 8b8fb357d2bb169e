//! Errors of a command line, in clap's words but for two things. clap proposes internal subcommands, and
//! does not say which argument is not UTF-8.

use std::ffi::OsString;

use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use super::Args;

/// The error as users see it; `words` are the command line.
pub fn with_advice(mut error: clap::Error, words: &[OsString]) -> clap::Error {
    if let Some(ContextValue::Strings(names)) = error.get(ContextKind::ValidSubcommand) {
        let shown = ContextValue::Strings(without_hidden(names));
        error.insert(ContextKind::ValidSubcommand, shown);
    }
    if let Some(ContextValue::Strings(names)) = error.get(ContextKind::SuggestedSubcommand) {
        let shown = without_hidden(names);
        if shown.is_empty() {
            let wrong = error.get(ContextKind::InvalidSubcommand);
            let wrong = wrong.map_or(String::new(), |wrong| format!(" '{wrong}'"));
            let what = format!("unrecognized subcommand{wrong}");
            return Args::command().error(ErrorKind::InvalidSubcommand, what);
        }
        error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(shown));
    }
    match words.iter().find(|word| word.to_str().is_none()) {
        Some(word) if error.kind() == ErrorKind::InvalidUtf8 => {
            let word = word.to_string_lossy();
            let what = format!(
                "`{word}` is not UTF-8, which only the names of directories and files may be"
            );
            Args::command().error(ErrorKind::InvalidUtf8, what)
        }
        _ => error,
    }
}

fn without_hidden(names: &[String]) -> Vec<String> {
    let all = Args::command();
    let is_hidden =
        |name: &String| all.find_subcommand(name).is_some_and(clap::Command::is_hide_set);
    names.iter().filter(|name| !is_hidden(name)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::os::unix::ffi::OsStringExt;

    fn text_of(words: &[&[u8]]) -> String {
        let words: Vec<OsString> =
            words.iter().map(|word| OsString::from_vec(word.to_vec())).collect();
        with_advice(Args::try_parse_from(&words).unwrap_err(), &words).to_string()
    }

    #[test]
    fn what_is_hidden_is_not_proposed() {
        let said = text_of(&[b"dray", b"moutn"]);
        assert!(said.contains("'mount'") && !said.contains("mount-"), "{said}");
        let said = text_of(&[b"dray", b"wake-moun"]);
        assert!(said.contains("'wake-moun'") && !said.contains("wake-mount"), "{said}");
        let said = text_of(&[b"dray", b"-q"]);
        assert!(said.contains("serve, mount, umount") && !said.contains("wake-mount"), "{said}");
    }

    #[test]
    fn what_is_no_text_is_named() {
        let said = text_of(&[b"dray", b"mount", b"dray://h/x", b"/m", b"-o", b"ro,na\xffme"]);
        assert!(said.contains("ro,na\u{fffd}me` is not UTF-8"), "{said}");
    }
}
