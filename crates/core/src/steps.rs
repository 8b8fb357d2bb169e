//! The steps of one request, and what they keep.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

thread_local! {
    /// Guards of a request that is over, for the next one: so its steps cost no allocation.
    static SPARE_GUARDS: Cell<Option<Arc<StepGuards>>> = const { Cell::new(None) };
}

/// The steps of one request. They keep guards until the last step has ended, such as replay slots. If the client
/// process dies in between, the next process finds the guards taken. So no step is made twice.
#[derive(Clone)]
pub struct Steps(Option<Arc<StepGuards>>);

/// The guards that the steps of one request keep.
#[derive(Default)]
struct StepGuards(Mutex<KeptGuards>);

#[derive(Default)]
struct KeptGuards {
    /// The used ones, and then those of requests that are over.
    places: Vec<Box<dyn GuardPlace>>,
    used: usize,
}

/// Room for one guard of a certain type.
trait GuardPlace: Any + Send {
    fn clear(&mut self);
}

impl<T: Any + Send> GuardPlace for Option<T> {
    fn clear(&mut self) {
        *self = None;
    }
}

impl KeptGuards {
    fn keep<T: Any + Send>(&mut self, guard: T) {
        let place = self.places.get_mut(self.used).map(|place| &mut **place as &mut dyn Any);
        match place.and_then(|place| place.downcast_mut::<Option<T>>()) {
            Some(place) => *place = Some(guard),
            None => self.places.insert(self.used, Box::new(Some(guard))),
        }
        self.used += 1;
    }

    /// Drops the guards, and keeps room for one: most requests have one.
    fn clear(&mut self) {
        self.places.truncate(1);
        self.places.iter_mut().for_each(|place| place.clear());
        self.used = 0;
    }
}

impl Steps {
    pub(crate) fn begin() -> Steps {
        // The thread may be ending.
        let spare = SPARE_GUARDS.try_with(Cell::take).ok().flatten();
        Steps(Some(spare.unwrap_or_default()))
    }

    pub(crate) fn keep(&self, guard: impl Any + Send) {
        let Some(StepGuards(guards)) = self.0.as_deref() else { return };
        guards.lock().unwrap_or_else(PoisonError::into_inner).keep(guard);
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        let Some(mut last) = self.0.take() else { return };
        // Where two threads end at once, neither has them alone, and they are dropped.
        if let Some(StepGuards(guards)) = Arc::get_mut(&mut last) {
            guards.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
            let _ = SPARE_GUARDS.try_with(|spare| spare.set(Some(last)));
        }
    }
}

impl fmt::Debug for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Steps")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Context;

    #[test]
    fn guards_are_kept_until_the_last_context_of_the_steps_is_gone() {
        let (one, other, third) = (Arc::new(1), Arc::new(2), Arc::new(3));
        let counts = || [&one, &other, &third].map(Arc::strong_count);
        Context::system().keep(one.clone());
        assert_eq!(counts(), [1; 3], "a request of one step keeps nothing");
        let steps = Context::system().in_steps();
        let further = steps.uncounted();
        [&one, &other, &third].into_iter().for_each(|guard| steps.keep(guard.clone()));
        drop(steps);
        assert_eq!(counts(), [2; 3]);
        drop(further);
        assert_eq!(counts(), [1; 3]);
    }

    #[test]
    fn the_guards_of_a_request_have_the_room_of_the_one_before() {
        let room = |cx: &Context| Arc::as_ptr(cx.steps.as_ref().unwrap().0.as_ref().unwrap());
        let guard = Arc::new(());
        let first = Context::system().in_steps();
        let (at, further) = (room(&first), first.clone());
        first.keep(guard.clone());
        drop(first);
        assert_eq!(Arc::strong_count(&guard), 2, "a step goes on");
        let beside = Context::system().in_steps();
        assert_ne!(room(&beside), at);
        drop(further);
        assert_eq!(Arc::strong_count(&guard), 1);
        let next = Context::system().in_steps();
        assert_eq!(room(&next), at);
        next.keep(7);
        next.keep(guard.clone());
        next.keep(guard.clone());
        assert_eq!(Arc::strong_count(&guard), 3, "guards of all types are kept");
        drop(next);
        assert_eq!(Arc::strong_count(&guard), 1);
    }
}
