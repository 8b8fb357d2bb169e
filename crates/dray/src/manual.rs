//! Completions and man pages, made from the definitions of the command line.

use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::args::Args;
use crate::error::{Doing, Failure};
use crate::output;

/// Prints the completions for a shell.
pub fn completions(shell: Shell) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "dray", &mut script);
    output::print(String::from_utf8_lossy(&script))
}

/// Writes a page for the command and one for each subcommand into `dir`.
pub fn man(dir: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(dir).doing(|| format!("cannot make {}", dir.display()))?;
    let mut command = Args::command();
    command.build();
    write_page(dir, "dray", command.clone())?;
    let shown = |sub: &&clap::Command| !sub.is_hide_set() && sub.get_name() != "help";
    for sub in command.get_subcommands().filter(shown) {
        let name = format!("dray-{}", sub.get_name());
        write_page(dir, &name, sub.clone())?;
    }
    Ok(())
}

fn write_page(dir: &Path, name: &str, command: clap::Command) -> Result<(), Failure> {
    let path = dir.join(format!("{name}.1"));
    let doing = || format!("cannot write {}", path.display());
    let mut page = Vec::new();
    let named = command.display_name(name.to_owned());
    clap_mangen::Man::new(named).title(name.to_uppercase()).render(&mut page).doing(doing)?;
    std::fs::write(&path, page).doing(doing)
}

#[cfg(test)]
mod tests {
    use super::*;

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
    }
}
