//! The rules of a server: those of the configuration, and what was changed since, at this server or at another
//! one of a projection.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_layers::qos::{QosGate, QosRule, RuleSet};
use serde_json::{Map, Value, json};
use toml::Table;

use super::kept;
use super::live::{RuleChange, RuleChanges, RuleStamp};
use super::parse::{PlacedRule, rule_of};
use super::shown::shown;
use super::{Written, written_in};
use crate::error::Failure;
use crate::serve::export::ExportPlan;
use crate::serve::export_state::ExportState;

/// An export, as its rules see it.
pub struct BookExport {
    pub name: String,
    pub gate: QosGate,
    /// This server's place in the definition of the projection; none: the export is of no projection.
    pub place: Option<u32>,
}

/// The rules of all exports.
pub struct RuleBook {
    exports: Vec<BookExport>,
    configured: Written,
    state_dir: PathBuf,
    state: Mutex<Changes>,
}

/// By export, in their order.
#[derive(Clone)]
struct Changes {
    /// What counts now.
    live: Vec<RuleChanges>,
    /// What the next start is to have.
    kept: Vec<RuleChanges>,
    /// Counted up with each change.
    versions: Vec<u64>,
}

/// What became of a change that another server has brought.
pub struct TakenChange {
    pub name: String,
    /// Why it does not count here; none: it counts.
    pub refused: Option<String>,
}

/// The exports of a server.
pub fn book_exports(plans: &[ExportPlan], exports: &[Arc<ExportState>]) -> Vec<BookExport> {
    let one = |(plan, export): (&ExportPlan, &Arc<ExportState>)| BookExport {
        name: export.name.clone(),
        gate: export.qos.clone(),
        place: plan.projection.as_ref().map(|projection| projection.position as u32),
    };
    plans.iter().zip(exports).map(one).collect()
}

impl RuleBook {
    /// With the rules of the configuration, and what was kept of changes; they count from [`RuleBook::begin`]
    /// on. Errors: a configuration or a file of kept rules that cannot be read.
    pub fn new(
        qos: &Table,
        state_dir: &Path,
        exports: Vec<BookExport>,
    ) -> Result<RuleBook, Failure> {
        let configured = written_in(qos).map_err(Failure::usage)?;
        let names: Vec<_> = exports.iter().map(|export| export.name.as_str()).collect();
        let kept = kept::read(state_dir, &names)?;
        let versions = vec![1; exports.len()];
        let state = Mutex::new(Changes { live: kept.clone(), kept, versions });
        Ok(RuleBook { exports, configured, state_dir: state_dir.to_owned(), state })
    }

    fn lock(&self) -> MutexGuard<'_, Changes> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the rules count. A kept change that does not fit beside the configuration is refused, and named in the
    /// log. Errors: rules of the configuration do not fit together.
    pub fn begin(&self) -> Result<(), String> {
        let mut state = self.lock();
        for (name, table) in &self.configured {
            let rule = rule_of(name, table)?;
            if !self.exports.iter().any(|export| rule.is_for(&export.name)) {
                log::warn!("[qos.rule.{name}] is for an export that this server does not have");
            }
        }
        let all = state.live.iter_mut().enumerate();
        let sets: Result<Vec<_>, _> = all.map(|(at, live)| self.begin_with(at, live)).collect();
        for (export, set) in self.exports.iter().zip(sets?) {
            export.gate.set_rules(set);
        }
        Ok(())
    }

    /// With what was kept, as far as it fits: the oldest change comes first.
    fn begin_with(&self, at: usize, live: &mut RuleChanges) -> Result<RuleSet, String> {
        let why = match self.compile(at, live) {
            Ok(set) => return Ok(set),
            Err(why) => why,
        };
        let mut names: Vec<_> = live.iter().map(|one| (one.stamp, one.name.clone())).collect();
        names.sort();
        live.iter_mut().for_each(|change| change.refused = Some(why.clone()));
        let mut set = self.compile(at, live)?;
        // A rule may need one that was changed later.
        for is_last in [false, true] {
            for (_, name) in &names {
                let mut with_it = live.clone();
                let one = with_it.iter_mut().find(|one| one.name == *name);
                let Some(one) = one.filter(|one| one.refused.is_some()) else { continue };
                one.refused = None;
                match self.compile(at, &with_it) {
                    Ok(fits) => (*live, set) = (with_it, fits),
                    Err(why) => {
                        let one = live.iter_mut().find(|one| one.name == *name);
                        one.into_iter().for_each(|one| one.refused = Some(why.clone()));
                        if is_last {
                            self.warn_of_kept(name, &why);
                        }
                    }
                }
            }
        }
        Ok(set)
    }

    fn warn_of_kept(&self, name: &str, why: &str) {
        log::warn!(
            "rule `{name}`, kept in {}, does not count: {why}. Remove it with `dray qos remove {name} --keep`, or \
             correct the configuration",
            self.state_dir.join(kept::FILE_NAME).display()
        );
    }

    /// The rules of an export, as they were written.
    fn written(&self, at: usize, live: &RuleChanges) -> Written {
        let export = &self.exports[at].name;
        let is_ours = |name: &str, table: &Table| {
            rule_of(name, table).map_or(true, |rule| rule.is_for(export)) // a wrong one is found later
        };
        let configured = self.configured.iter().filter(|(name, table)| is_ours(name, table));
        let mut rules: Written =
            configured.map(|(name, table)| (name.clone(), table.clone())).collect();
        for change in live.iter().filter(|change| change.refused.is_none()) {
            match &change.rule {
                Some(rule) => rules.insert(change.name.clone(), rule.clone()),
                None => rules.remove(&change.name),
            };
        }
        rules
    }

    fn compile(&self, at: usize, live: &RuleChanges) -> Result<RuleSet, String> {
        let export = &self.exports[at].name;
        let rules = self.written(at, live);
        let placed: Result<Vec<PlacedRule>, String> =
            rules.iter().map(|(name, table)| rule_of(name, table)).collect();
        let placed = placed?.into_iter().filter(|rule| rule.is_for(export));
        let ours: Vec<QosRule> = placed.map(|placed| placed.rule).collect();
        RuleSet::new(&ours).map_err(|error| format!("export `{export}`: {error}"))
    }

    /// Later than all changes that are known.
    fn stamp(&self, at: usize, state: &Changes) -> RuleStamp {
        let now_us = dray_rt::wall_clock().as_micros() as u64;
        let last = state.live[at].last().max(state.kept[at].last());
        let at_us = now_us.max(last.at_us.saturating_add(1));
        RuleStamp { at_us, server: self.exports[at].place.unwrap_or_default() }
    }

    /// Sets a rule at all exports that it is for, and removes one of that name from the others. Answers which
    /// exports have changed. Errors: it is wrong, or overlaps with another one; nothing is changed.
    pub fn set(&self, name: &str, table: &Table, keep: bool) -> Result<Vec<usize>, String> {
        let rule = rule_of(name, table)?;
        if !self.exports.iter().any(|export| rule.is_for(&export.name)) {
            let names: Vec<_> = self.exports.iter().map(|export| export.name.as_str()).collect();
            return Err(format!(
                "rule `{name}` is for an export that this server does not have: it has {}",
                names.join(", ")
            ));
        }
        self.change(name, keep, |export, has_it| match rule.is_for(&export.name) {
            true => Some(Some(table.clone())),
            false => has_it.then_some(None),
        })
    }

    /// Removes a rule. Answers which exports had it. Errors: there is none of that name, or others are within it.
    pub fn remove(&self, name: &str, keep: bool) -> Result<Vec<usize>, String> {
        let changed = self.change(name, keep, |_, has_it| has_it.then_some(None))?;
        match changed.is_empty() {
            true => Err(format!("there is no rule `{name}`: `dray qos show` names them")),
            false => Ok(changed),
        }
    }

    /// `change_of`: what becomes of the rule in an export, which may have it; none: nothing.
    fn change(
        &self,
        name: &str,
        keep: bool,
        change_of: impl Fn(&BookExport, bool) -> Option<Option<Table>>,
    ) -> Result<Vec<usize>, String> {
        let mut state = self.lock();
        let (mut next, mut changed) = (state.clone(), Vec::new());
        for (at, export) in self.exports.iter().enumerate() {
            let has_it = self.written(at, &state.live[at]).contains_key(name)
                || state.live[at].get(name).is_some_and(|one| one.rule.is_some());
            let Some(rule) = change_of(export, has_it) else { continue };
            let stamp = self.stamp(at, &state);
            let change = RuleChange { name: name.to_owned(), stamp, rule, keep, refused: None };
            self.note(at, &mut next, change)?;
            changed.push(at);
        }
        let sets: Result<Vec<RuleSet>, String> =
            changed.iter().map(|at| self.compile(*at, &next.live[*at])).collect();
        let sets = sets?;
        if next.kept != state.kept {
            self.keep(&next).map_err(|error| {
                format!("the rule cannot be kept in {}: {error}", self.state_dir.display())
            })?;
        }
        *state = next;
        for (at, set) in changed.iter().zip(sets) {
            self.exports[*at].gate.set_rules(set);
            self.try_refused(*at, &mut state);
        }
        Ok(changed)
    }

    fn keep(&self, state: &Changes) -> std::io::Result<()> {
        let names = self.exports.iter().map(|export| export.name.as_str());
        kept::write(&self.state_dir, names.zip(&state.kept))
    }

    /// Errors: too many changes.
    fn note(&self, at: usize, state: &mut Changes, change: RuleChange) -> Result<(), String> {
        // Other servers have to hear of a removal. Without them there is nothing to remember.
        let is_over = self.exports[at].place.is_none()
            && change.rule.is_none()
            && !self.configured.contains_key(&change.name);
        if is_over && change.keep {
            state.kept[at].forget(&change.name);
        }
        if is_over {
            state.live[at].forget(&change.name);
            return Ok(());
        }
        state.versions[at] += 1;
        if change.keep {
            state.kept[at].take(change.clone())?;
        }
        state.live[at].take(change)
    }

    /// Rules that were refused may fit beside the others now.
    fn try_refused(&self, at: usize, state: &mut Changes) {
        let refused = state.live[at].iter().filter(|change| change.refused.is_some());
        let names: Vec<_> = refused.map(|change| change.name.clone()).collect();
        for name in names {
            let mut with_it = state.live[at].clone();
            let one = with_it.iter_mut().find(|change| change.name == name);
            one.into_iter().for_each(|change| change.refused = None);
            if let Ok(set) = self.compile(at, &with_it) {
                state.live[at] = with_it;
                self.exports[at].gate.set_rules(set);
            }
        }
    }

    /// Takes what another server knows of the rules of an export, and says of each what became of it.
    pub fn take(&self, at: usize, changes: Vec<RuleChange>) -> Vec<TakenChange> {
        let mut state = self.lock();
        let kept_before = state.kept[at].clone();
        let mut taken: Vec<TakenChange> =
            changes.into_iter().map(|change| self.take_one(at, &mut state, change)).collect();
        self.try_refused(at, &mut state);
        if state.kept[at] == kept_before {
            return taken;
        }
        if let Err(error) = self.keep(&state) {
            let dir = self.state_dir.display();
            let why = format!("the rule counts, but cannot be kept in {dir}: {error}");
            log::warn!("export `{}`: {why}", self.exports[at].name);
            for one in taken.iter_mut().filter(|one| one.refused.is_none()) {
                one.refused = Some(why.clone());
            }
        }
        taken
    }

    fn take_one(&self, at: usize, state: &mut Changes, change: RuleChange) -> TakenChange {
        let name = change.name.clone();
        let live = &state.live[at];
        if !live.is_news(&change) {
            let same = live.get(&name).filter(|known| known.stamp == change.stamp);
            let refused = same.and_then(|known| known.refused.clone());
            let kept = match change.keep && refused.is_none() {
                true => state.kept[at].take(change),
                false => Ok(()),
            };
            return TakenChange { name, refused: refused.or(kept.err()) };
        }
        let mut next = live.clone();
        let noted = next.take(change.clone());
        state.versions[at] += 1;
        match noted.and_then(|()| self.compile(at, &next)) {
            Ok(set) => {
                let export = &self.exports[at];
                log::info!("export `{}`: rule `{name}` is as another server has it", export.name);
                export.gate.set_rules(set);
                state.live[at] = next;
                let kept = if change.keep { state.kept[at].take(change) } else { Ok(()) };
                TakenChange { name, refused: kept.err() }
            }
            Err(why) => {
                log::warn!("rule `{name}` of another server does not count here: {why}");
                let refused = Some(why);
                // Where there are too many changes, this one is not remembered.
                let _ = state.live[at].take(RuleChange { refused: refused.clone(), ..change });
                TakenChange { name, refused }
            }
        }
    }

    /// The version of an export's rules, and all changes, for the other servers.
    pub fn changes(&self, at: usize) -> (u64, Vec<RuleChange>) {
        let state = self.lock();
        let (live, kept) = (&state.live[at], &state.kept[at]);
        let is_other = |change: &&RuleChange| live.get(&change.name) != Some(*change);
        let all = kept.iter().filter(is_other).chain(live.iter()).cloned().collect();
        (state.versions[at], all)
    }

    /// Counted up with each change of an export.
    pub fn version(&self, at: usize) -> u64 {
        self.lock().versions[at]
    }

    /// What `dray qos show` says of an export at this server.
    pub fn show(&self, at: usize) -> Map<String, Value> {
        let (rules, refused) = {
            let state = self.lock();
            let refused = state.live[at].iter().filter_map(|change| {
                change.refused.as_ref().map(|why| (change.name.clone(), json!(why)))
            });
            (self.written(at, &state.live[at]), refused.collect::<Map<_, _>>())
        };
        let qos = shown(&self.exports[at].gate.report());
        let shown = [("rules", json!(rules)), ("refused", Value::Object(refused)), ("qos", qos)];
        shown.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
    }

    pub fn exports(&self) -> &[BookExport] {
        &self.exports
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Book {
        book: RuleBook,
        dir: tempfile::TempDir,
    }

    const CONFIGURED: &str = "[rule.low]\nmatch = { user = \"1-5\" }\nlimit = \"1M\"";

    fn book_in(dir: tempfile::TempDir, place: u32, configured: &str) -> Book {
        let export = |name: &str| BookExport {
            name: name.to_owned(),
            gate: QosGate::new(),
            place: (name == "shared").then_some(place),
        };
        let exports = vec![export("shared"), export("own")];
        let book = RuleBook::new(&configured.parse().unwrap(), dir.path(), exports).unwrap();
        book.begin().unwrap();
        Book { book, dir }
    }

    fn book(place: u32, configured: &str) -> Book {
        book_in(tempfile::tempdir().unwrap(), place, configured)
    }

    impl Book {
        fn set(&self, name: &str, rule: &str, keep: bool) -> Result<Vec<usize>, String> {
            self.book.set(name, &rule.parse().unwrap(), keep)
        }

        fn rules(&self, at: usize) -> Vec<String> {
            self.book.written(at, &self.book.lock().live[at]).into_keys().collect()
        }

        /// All that it knows, as another server hears it.
        fn pass_on(&self, other: &Book) -> Vec<Option<String>> {
            let changes = serde_json::to_value(self.book.changes(0).1).unwrap();
            let changes = serde_json::from_value(changes).unwrap();
            other.book.take(0, changes).into_iter().map(|one| one.refused).collect()
        }
    }

    #[test]
    fn a_rule_of_another_server_counts_in_the_shared_export_alone() {
        let (here, there) = (book(0, CONFIGURED), book(1, ""));
        assert_eq!(here.set("x", "match = { user = 7 }\nlimit = \"1M\"", false), Ok(vec![0, 1]));
        assert_eq!(here.pass_on(&there), [None]);
        assert_eq!((there.rules(0), there.rules(1)), (vec!["x".to_owned()], vec![]));
        // A removal arrives, too, and what was said before it does not undo it.
        let before = here.book.changes(0).1;
        assert_eq!(here.book.remove("x", false), Ok(vec![0, 1]));
        assert_eq!(here.pass_on(&there), [None]);
        there.book.take(0, before);
        assert!(there.rules(0).is_empty());
        // Of the export that is no other server's nothing is remembered.
        assert!(here.book.changes(1).1.is_empty());
    }

    #[test]
    fn a_rule_that_does_not_fit_at_another_server_waits_there_until_it_does() {
        let (here, there) = (book(0, ""), book(1, CONFIGURED));
        here.set("x", "match = { user = \"5-9\" }\nlimit = \"1M\"", true).unwrap();
        let refused = here.pass_on(&there).remove(0).unwrap();
        assert!(refused.contains("rules `low` and `x` overlap"), "{refused}");
        assert_eq!(there.rules(0), ["low"]);
        assert!(there.book.show(0)["refused"]["x"].is_string());
        assert_eq!(here.pass_on(&there).remove(0), Some(refused)); // it says so again
        there.book.remove("low", false).unwrap();
        assert_eq!(there.rules(0), ["x"]);
        assert_eq!(here.pass_on(&there), [None]);
    }

    #[test]
    fn what_is_kept_outlives_what_is_not_at_each_server() {
        let (here, there) = (book(0, CONFIGURED), book(1, ""));
        here.set("x", "match = { user = 7 }\nlimit = \"1M\"", true).unwrap();
        here.set("x", "match = { user = 8 }\nlimit = \"1M\"", false).unwrap();
        here.book.remove("low", true).unwrap();
        assert!(here.pass_on(&there).iter().all(Option::is_none));
        let user = |book: &Book| book.book.show(0)["rules"]["x"]["match"]["user"].clone();
        for one in [here, there] {
            assert_eq!(user(&one), 8);
            let again = book_in(one.dir, 0, CONFIGURED);
            assert_eq!((again.rules(0), user(&again)), (vec!["x".to_owned()], json!(7)));
        }
    }

    // proves: P368
    #[test]
    fn a_kept_rule_that_does_not_fit_beside_the_configuration_is_refused_and_holds_no_start_up() {
        let names =
            |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let before = book(0, "");
        before.set("k", "match = { user = 3 }\nlimit = \"1M\"", true).unwrap();
        before.set("x", "match = { user = 7 }\nlimit = \"1M\"", true).unwrap();
        let here = book_in(before.dir, 0, "[rule.u]\nmatch = { user = 3 }\nlimit = \"2M\"");
        for at in [0, 1] {
            assert_eq!(here.rules(at), ["u", "x"]);
            let refused = here.book.show(at)["refused"].clone();
            assert!(refused["k"].as_str().unwrap().contains("rules `k` and `u` overlap"));
            assert_eq!(refused.as_object().unwrap().len(), 1);
        }
        // The other one away, it counts.
        assert_eq!(here.book.remove("u", false), Ok(vec![0, 1]));
        assert_eq!(here.rules(0), ["k", "x"]);
        assert_eq!(here.book.remove("k", true), Ok(vec![0, 1]));
        let again = book_in(here.dir, 0, "[rule.u]\nmatch = { user = 3 }\nlimit = \"2M\"");
        assert_eq!(
            (again.rules(1), &again.book.show(1)["refused"]),
            (names(&["u", "x"]), &json!({}))
        );
        // The configuration by itself has to fit.
        let wrong = format!("{CONFIGURED}\n[rule.other]\nmatch = {{ user = \"5-9\" }}");
        let export = BookExport { name: "own".into(), gate: QosGate::new(), place: None };
        let dir = tempfile::tempdir().unwrap();
        let book = RuleBook::new(&wrong.parse().unwrap(), dir.path(), vec![export]).unwrap();
        assert!(book.begin().unwrap_err().contains("overlap"));
    }

    #[test]
    fn a_rule_that_moves_to_another_export_leaves_the_first() {
        let here = book(0, CONFIGURED);
        let rule =
            |export: &str| format!("match = {{ user = 7, export = \"{export}\" }}\nlimit = \"1M\"");
        assert_eq!(here.set("x", &rule("own"), false), Ok(vec![1]));
        assert_eq!(here.set("x", &rule("shared"), false), Ok(vec![0, 1]));
        assert_eq!((here.rules(0).len(), here.rules(1).len()), (2, 1));
        let wrong = here.set("y", "match = { user = 3 }\nlimit = 0", true).unwrap_err();
        assert!(wrong.contains("would let no call through"));
        assert!(here.set("y", &rule("nowhere"), true).unwrap_err().contains("shared, own"));
        assert!(here.book.remove("y", false).is_err());
    }
}
