// Creates and frees teams and workspaces for Python.
#include <new>

#include "api.h"
#include "call.h"
#include "team.h"
#include "workspace.h"

OutriderTeam* outrider_team_create(int32_t num_threads) {
  OutriderTeam* team = nullptr;
  outrider::call([&] {
    team = reinterpret_cast<OutriderTeam*>(new outrider::Team(num_threads));
  });
  return team;
}

void outrider_team_free(OutriderTeam* team) { delete reinterpret_cast<outrider::Team*>(team); }

OutriderWorkspace* outrider_workspace_create(void) { return new (std::nothrow) OutriderWorkspace(); }

void outrider_workspace_free(OutriderWorkspace* workspace) { delete workspace; }

void outrider_workspace_measure(OutriderWorkspace* workspace, int32_t is_on) { workspace->times.is_on = is_on != 0; }

void outrider_workspace_take_times(OutriderWorkspace* workspace, int64_t* spent) { workspace->times.take(spent); }
