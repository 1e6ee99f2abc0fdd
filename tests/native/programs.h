// The programs of all schedules, as Python makes them now.
#ifndef TFSCALE_TESTS_NATIVE_PROGRAMS_H_
#define TFSCALE_TESTS_NATIVE_PROGRAMS_H_

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "custom_ops/engine/program.h"

namespace tfscale {

struct Plan {
  std::string name;
  Goal goal = Goal::kAllReduce;
  int ranks = 0, chunks = 0;
  std::vector<std::vector<int>> flat;                    // per rank
  std::vector<std::shared_ptr<const Program>> programs;  // per rank
};

inline std::string RunPrograms() {
  const std::string here = __FILE__;
  const char* python = std::getenv("PYTHON");
  const std::string command = std::string(python ? python : "python3") + " -I -B " +
                              here.substr(0, here.rfind('/') + 1) + "programs.py";
  std::string output;
  FILE* pipe = popen(command.c_str(), "r");
  char buffer[65536];
  for (size_t n; pipe && (n = std::fread(buffer, 1, sizeof(buffer), pipe)) > 0;) {
    output.append(buffer, n);
  }
  if (pipe == nullptr || pclose(pipe) != 0) {
    std::cerr << "this failed, and makes what the tests run: " << command << std::endl;
    std::exit(1);
  }
  return output;
}

inline std::vector<Plan> ReadPlans() {
  const std::map<std::string, Goal> goals = {
      {"all_reduce", Goal::kAllReduce}, {"reduce_scatter", Goal::kReduceScatter},
      {"all_gather", Goal::kAllGather}, {"broadcast", Goal::kBroadcast},
      {"mixture", Goal::kMixture},      {"route", Goal::kRoute}};
  std::vector<Plan> plans;
  std::istringstream lines(RunPrograms());
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    Plan plan;
    std::string goal;
    int rank;
    words >> plan.name >> goal >> plan.ranks >> plan.chunks >> rank;
    plan.goal = goals.at(goal);
    if (rank == 0) plans.push_back(plan);
    std::vector<int> flat, in_x, in_y;
    if (plan.goal == Goal::kRoute) {
      for (std::vector<int>* places : {&in_x, &in_y}) {
        int count, chunk;
        for (words >> count; count > 0 && words >> chunk; --count) places->push_back(chunk);
      }
    }
    for (int number; words >> number;) flat.push_back(number);
    auto program = std::make_shared<Program>();
    Status status = Program::Parse(flat, plan.goal, rank, plan.ranks, plan.chunks, program.get());
    if (status.ok() && plan.goal == Goal::kRoute) status = program->Place(in_x, in_y);
    if (!status.ok()) {
      std::cerr << plan.name << ": " << status.message() << std::endl;
      std::exit(1);
    }
    plans.back().flat.push_back(flat);
    plans.back().programs.push_back(program);
  }
  return plans;
}

inline const std::vector<Plan>& Plans() {
  static const std::vector<Plan>* plans = new std::vector<Plan>(ReadPlans());
  return *plans;
}

inline const Plan& PlanOf(const std::string& name) {
  for (const Plan& plan : Plans()) {
    if (plan.name == name) return plan;
  }
  std::cerr << "programs.py makes no " << name << std::endl;
  std::exit(1);
}

inline std::vector<Plan> PlansFor(Goal goal, int most_ranks) {
  std::vector<Plan> chosen;
  for (const Plan& plan : Plans()) {
    if (plan.goal == goal && plan.ranks <= most_ranks) chosen.push_back(plan);
  }
  return chosen;
}

}  // namespace tfscale

#endif  // TFSCALE_TESTS_NATIVE_PROGRAMS_H_
