//! Completions and man pages, made from the definitions of the command line.

use std::path::Path;

use clap::{Command, CommandFactory};
use clap_complete::Shell;

use crate::args::Args;
use crate::error::{Doing, Failure};
use crate::output;

/// Prints the completions for a shell.
pub fn completions(shell: Shell) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut shown(&Args::command()), "dray", &mut script);
    output::print(String::from_utf8_lossy(&script))
}

/// A command without what is hidden: shells would offer that, too.
fn shown(command: &Command) -> Command {
    let arguments = command.get_arguments().filter(|argument| !argument.is_hide_set());
    let commands = command.get_subcommands().filter(|command| !command.is_hide_set());
    let about = command.get_about().cloned().unwrap_or_default();
    // clap takes words that last; these do, since the process ends when they are printed.
    let lasting = |word: &str| -> &'static str { word.to_owned().leak() };
    let mut bare = Command::new(lasting(command.get_name())).about(about);
    if let Some(version) = command.get_version() {
        bare = bare.version(lasting(version));
    }
    bare.args(arguments.cloned()).subcommands(commands.map(shown))
}

/// Writes a page for the command and one for each subcommand into `dir`.
pub fn man(dir: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(dir).doing(|| format!("cannot make {}", dir.display()))?;
    // Which has no page.
    let mut command = Args::command().disable_help_subcommand(true);
    command.build();
    write_page(dir, "dray", command.clone())?;
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        let name = format!("dray-{}", sub.get_name());
        write_page(dir, &name, sub.clone())?;
    }
    Ok(())
}

fn write_page(dir: &Path, name: &str, command: Command) -> Result<(), Failure> {
    let path = dir.join(format!("{name}.1"));
    let doing = || format!("cannot write {}", path.display());
    let mut page = Vec::new();
    let named = command.display_name(name.to_owned());
    let page_of = clap_mangen::Man::new(named).title(name.to_uppercase()).manual("User Commands");
    let source = concat!("dray ", env!("CARGO_PKG_VERSION"));
    page_of.source(source).render(&mut page).doing(doing)?;
    // What stands behind the options is about exit codes.
    let page = String::from_utf8_lossy(&page).replace(".SH EXTRA", ".SH \"EXIT STATUS\"");
    std::fs::write(&path, page).doing(doing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shells_offer_what_is_meant_for_people() {
        let command = shown(&Args::command());
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command.clone(), "dray", &mut script);
            let script = String::from_utf8(script).unwrap();
            for word in ["serve", "survey", "listen", "foreground", "version"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
            for word in
                ["keep-files", "mount-daemon", "mount-supervisor", "wake-mount", "boot-id", "fake"]
            {
                assert!(!script.contains(word), "{shell}: {word}");
            }
        }
    }

    #[test]
    fn every_subcommand_has_a_page() {
        let dir = tempfile::tempdir().unwrap();
        man(dir.path()).unwrap();
        for name in ["dray", "dray-serve", "dray-mount", "dray-umount", "dray-status"] {
            let page = std::fs::read_to_string(dir.path().join(format!("{name}.1"))).unwrap();
            assert!(page.contains(".TH"), "{name}");
        }
        let serve = std::fs::read_to_string(dir.path().join("dray-serve.1")).unwrap();
        assert!(serve.contains("\\-\\-export") && serve.contains("squash=root"), "{serve}");
        let dray = std::fs::read_to_string(dir.path().join("dray.1")).unwrap();
        assert!(dray.contains(".SH \"EXIT STATUS\""), "{dray}");
        // Every page that another one names is there.
        for line in dray.lines().filter_map(|line| line.strip_suffix("(1)")) {
            let page = format!("{}.1", line.replace('\\', ""));
            assert!(dir.path().join(&page).exists(), "{page}");
        }
        assert!(dray.contains("dray\\-mount(1)"), "{dray}");
    }
}
