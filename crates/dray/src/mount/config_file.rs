//! The configuration file of a mount (`-o config=FILE`). packaging/mount.toml.example documents every key.
//!
//! What it says becomes options in front of those of the command line, which have precedence so. The mount's
//! processes get the options alone: they go on with them, whatever is in the file later.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use serde::Deserialize;

use crate::error::Failure;
use crate::serve::export::split_commas;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ConfigFile {
    cache: Option<CacheTable>,
}

/// Each key is a mount option.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CacheTable {
    /// `cache=`
    dir: String,
    /// `cache_size=`
    size: Option<String>,
    /// `cache_rules=`, one rule each.
    #[serde(default)]
    rules: Vec<String>,
    /// `cache_passthrough=`
    passthrough: Option<bool>,
    /// `cache_write=`
    write: Option<String>,
    /// `cache_dirty=`
    dirty: Option<String>,
    /// `cache_dirty_age=`
    dirty_age: Option<f64>,
}

/// The lists behind `-o` without `config=`, and with what the file says in front. Errors: the file cannot be read, or says
/// what it cannot.
pub fn expand(lists: &[String]) -> Result<Vec<String>, Failure> {
    let (mut options, mut file) = (Vec::new(), None);
    for option in lists.iter().flat_map(|list| split_commas(list)) {
        match option.strip_prefix("config=") {
            Some(path) => file = Some(path.to_owned()),
            None => options.push(option),
        }
    }
    let Some(file) = file else { return Ok(lists.to_vec()) };
    let mut all = read(Path::new(&file))?;
    all.append(&mut options);
    Ok(all.iter().filter(|option| !option.is_empty()).map(|option| escaped(option)).collect())
}

/// As [`split_commas`] reads it.
fn escaped(option: &str) -> String {
    let mut text = String::with_capacity(option.len());
    for character in option.chars() {
        if matches!(character, ',' | '\\') {
            text.push('\\');
        }
        text.push(character);
    }
    text
}

fn read(path: &Path) -> Result<Vec<String>, Failure> {
    let wrong = |what: &dyn std::fmt::Display| {
        Failure::usage(format!("the mount's configuration {}: {what}", path.display()))
    };
    if !path.is_absolute() {
        return Err(wrong(&"an absolute path is needed"));
    }
    let text = fs::read_to_string(path).map_err(|error| wrong(&error))?;
    options_of(&text).map_err(|error| wrong(&error.message()))
}

fn options_of(text: &str) -> Result<Vec<String>, toml::de::Error> {
    let config: ConfigFile = toml::from_str(text)?;
    let Some(cache) = config.cache else { return Ok(Vec::new()) };
    let mut options = vec![format!("cache={}", cache.dir)];
    options.extend(cache.size.map(|size| format!("cache_size={size}")));
    if !cache.rules.is_empty() {
        let mut rules = String::from("cache_rules=");
        for (index, rule) in cache.rules.iter().enumerate() {
            let between = if index > 0 { "|" } else { "" };
            let _ = write!(rules, "{between}{rule}"); // a string takes it
        }
        options.push(rules);
    }
    let yes_no = |yes: bool| if yes { "yes" } else { "no" };
    options.extend(cache.write.map(|how| format!("cache_write={how}")));
    options.extend(cache.dirty.map(|size| format!("cache_dirty={size}")));
    options.extend(cache.dirty_age.map(|seconds| format!("cache_dirty_age={seconds}")));
    options.extend(cache.passthrough.map(|yes| format!("cache_passthrough={}", yes_no(yes))));
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mount::options::MountPlan;

    fn expanded(text: &str, options: &str) -> Result<Vec<String>, Failure> {
        let file = std::env::temp_dir().join(format!(
            "dray-mount-{}-{:?}.toml",
            std::process::id(),
            std::thread::current().id()
        ));
        fs::write(&file, text).unwrap();
        let all = expand(&[format!("config={},{options}", file.display())]);
        let _ = fs::remove_file(&file);
        all
    }

    // proves: P270
    #[test]
    fn the_file_says_what_options_say_and_options_have_precedence() {
        let text = "[cache]\ndir = \"/var/cache/a,b\"\nsize = \"200G\"\n\
                    rules = [\"path=/data/*&size>1M\", \"job=train-*\"]\npassthrough = false\n";
        let plan = MountPlan::parse(&expanded(text, "consistency=immutable").unwrap()).unwrap();
        let said = MountPlan::parse(&[
            "consistency=immutable,cache=/var/cache/a\\,b,cache_size=200G,cache_passthrough=no,\
             cache_rules=path=/data/*&size>1M|job=train-*"
                .to_owned(),
        ])
        .unwrap();
        assert_eq!(plan.lasting(), said.lasting());
        let cache = plan.cache_options().unwrap();
        assert_eq!((cache.size_bytes, plan.passes_through()), (200 << 30, false));
        assert_eq!(Some(cache.dir), said.cache);
        let all = expanded(text, "leases=yes,cache_size=1G,cache=/other").unwrap();
        let plan = MountPlan::parse(&all).unwrap();
        assert_eq!((plan.cache.unwrap(), plan.cache_bytes), ("/other".into(), Some(1 << 30)));
        assert_eq!(expanded("", "ro").unwrap(), ["ro"]);
        assert_eq!(expand(&["ro,rw".to_owned()]).unwrap(), ["ro,rw"]);
    }

    // proves: P270
    #[test]
    fn what_is_wrong_in_the_file_is_said() {
        for (text, hint) in [
            ("[cache]\n", "missing field `dir`"),
            ("[cache]\ndirectory = \"/a\"\n", "unknown field `directory`"),
            ("[cash]\n", "unknown field `cash`"),
            ("[cache]\ndir = 7\n", "string"),
        ] {
            let failure = expanded(text, "ro").unwrap_err();
            assert!(failure.message.contains(hint), "{text}: {}", failure.message);
            assert_eq!(failure.code, crate::error::EXIT_USAGE);
        }
        for (text, hint) in [
            ("[cache]\ndir = \"a\"\n", "absolute"),
            ("[cache]\ndir = \"/a\"\nsize = \"7\"\n", "16M or more"),
            ("[cache]\ndir = \"/a\"\nrules = [\"color=red\"]\n", "color"),
        ] {
            let all = expanded(text, "leases=yes").unwrap();
            let failure = MountPlan::parse(&all).unwrap_err();
            assert!(failure.message.contains(hint), "{text}: {}", failure.message);
        }
        assert!(expand(&["config=/nowhere/mount.toml".to_owned()]).is_err());
        assert!(expand(&["config=mount.toml".to_owned()]).is_err());
    }

    /// The example has every key.
    // proves: P270
    #[test]
    fn the_example_is_understood() {
        let example = include_str!("../../../../packaging/mount.toml.example");
        assert_eq!(options_of(example).unwrap(), Vec::<String>::new(), "nothing is on");
        let on: String = example
            .lines()
            .map(|line| line.strip_prefix("#:").unwrap_or(line).to_owned() + "\n")
            .collect();
        let keys: Vec<String> = options_of(&on)
            .unwrap()
            .iter()
            .map(|option| option.split('=').next().unwrap().to_owned())
            .collect();
        let expected = "cache cache_size cache_rules cache_write cache_dirty cache_dirty_age cache_passthrough";
        assert_eq!(keys.join(" "), expected);
    }
}
